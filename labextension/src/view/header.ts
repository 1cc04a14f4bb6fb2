/** Which device this is of, and what the kernel does now. */

import { element, nameElement, setAttribute, setName, setText } from './dom';
import type { Tick } from './protocol';
import { headline, status, type Trans } from './words';

export class Header {
  readonly node = element('div', 'nbguard-header');
  private readonly device = nameElement('span', 'nbguard-dim');
  private readonly dot = element('span', 'nbguard-dot');
  private readonly words = element('span');

  constructor(private readonly trans: Trans) {
    const title = element('h2', '', trans.__('GPU memory'));
    this.node.append(title, this.device, element('span', 'nbguard-status', this.dot, this.words));
  }

  /** `tick` is null while there is nothing to show. */
  update(tick: Tick | null, silent: boolean): void {
    const [tone, words] = tick === null ? ['none', ''] : status(tick, silent, this.trans);
    setName(this.device, tick === null ? '' : headline(tick, this.trans));
    setAttribute(this.dot, 'class', `nbguard-dot nbguard-${tone}`);
    setText(this.words, words);
    setAttribute(this.words, 'title', words || null);
  }
}
