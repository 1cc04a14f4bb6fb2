/** Whose memory this is: the notebook, its device, and what its kernel does now. Its height is always the same. */

import { element, nameElement, setAttribute, setName, setText, show } from './dom';
import type { Tick } from './protocol';
import { headline, status, type Trans } from './words';

export class Header {
  readonly node = element('div', 'nbguard-header');
  readonly #title = element('h2');
  readonly #name = nameElement('span', '');
  readonly #device = nameElement('span', 'nbguard-dim');
  readonly #dot = element('span', 'nbguard-dot');
  readonly #words = element('span');

  readonly #trans: Trans;

  constructor(trans: Trans) {
    this.#trans = trans;
    this.#title.append(this.#name);
    const status = element('span', 'nbguard-status', this.#dot, this.#words);
    this.node.append(this.#title, element('div', 'nbguard-header-line', this.#device, status));
  }

  /** `tick` is null while there is nothing to show, `notebook` empty where the host does not name one. */
  update(tick: Tick | null, silent: boolean, notebook: string): void {
    const [tone, words] = tick === null ? ['none', ''] : status(tick, silent, this.#trans);
    setName(this.#name, notebook === '' ? this.#trans.__('GPU memory') : notebook);
    setName(this.#device, tick === null ? '' : headline(tick, this.#trans));
    setAttribute(this.#dot, 'class', `nbguard-dot nbguard-${tone}`);
    setText(this.#words, words);
    setAttribute(this.#words, 'title', words || null);
    show(this.#dot, tone !== 'none');
  }
}
