/** Whose memory this is: the notebook, its device, and what its kernel does now. Its height is always the same. */

import { element, nameElement, setAttribute, setClass, setName, setText, show } from './dom';
import type { Tick } from './protocol';
import { headline, status, type Trans } from './words';

export class Header {
  readonly node = element('div', 'header');
  readonly #title = element('h2');
  readonly #name = nameElement('span', '');
  readonly #device = nameElement('span', 'dim');
  readonly #dot = element('span', 'dot');
  readonly #words = element('span');

  readonly #trans: Trans;

  constructor(trans: Trans) {
    this.#trans = trans;
    this.#title.append(this.#name);
    const status = element('span', 'status', this.#dot, this.#words);
    this.node.append(this.#title, element('div', 'header-line', this.#device, status));
  }

  /** `tick` is null while there is nothing to show, `notebook` empty where the host does not name one. */
  update(tick: Tick | null, silent: boolean, notebook: string): void {
    const [tone, words] = tick === null ? ['none', ''] : status(tick, silent, this.#trans);
    setName(this.#name, notebook === '' ? this.#trans.__('GPU memory') : notebook);
    setName(this.#device, tick === null ? '' : headline(tick, this.#trans));
    setClass(this.#dot, `dot ${tone}`);
    setText(this.#words, words);
    setAttribute(this.#words, 'title', words || null);
    show(this.#dot, tone !== 'none');
  }
}
