/** The ways in which something is kept alive, under its row, each with the line that cuts it. */

import { codeLine } from './code';
import type { Progress } from './connection';
import type { ViewContext } from './view_context';
import { element, nameElement, setName, setText, show } from './dom';
import type { WhyView } from './protocol';
import { cell, join } from './words';

export class WhyPanel {
  readonly node = element('div', 'nbguard-why');
  #rid = '';
  readonly #note = element('div', 'nbguard-dim');
  readonly #body = element('div');

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.node.hidden = true;
    this.node.setAttribute('role', 'group');
    this.node.append(this.#note, this.#body);
  }

  get isOpen(): boolean {
    return !this.node.hidden;
  }

  /** Ask for the ways of row `id` of heap `heap`; until the answer is there, an earlier one stays. */
  open(heap: number, id: number): void {
    show(this.node, true);
    setText(this.#note, this.#body.childElementCount ? '' : this.#context.trans.__('working…'));
    const rid = this.#context.connection.ask({ op: 'why', heap, id }, progress => {
      if (this.#rid === rid) {
        this.#hear(progress);
      }
    });
    this.#rid = rid;
  }

  close(): void {
    this.#rid = '';
    show(this.node, false);
    this.#body.replaceChildren();
  }

  #hear(progress: Progress): void {
    const { trans } = this.#context;
    switch (progress.op) {
      case 'late':
        setText(this.#note, trans.__('runs when the cell ends'));
        break;
      case 'queued':
        setText(this.#note, `${trans.__('runs when the cell ends')}: ${progress.why}`);
        break;
      case 'refused':
        setText(this.#note, progress.why);
        break;
      case 'lost':
        setText(this.#note, trans.__('The kernel was restarted.'));
        break;
      case 'why':
        setText(this.#note, '');
        this.#body.replaceChildren(this.#ways(progress.why));
        break;
      default:
        break;
    }
  }

  #ways(why: WhyView): HTMLElement {
    const { trans } = this.#context;
    const list = element('ol', 'nbguard-ways');
    for (const [path, number, stale, cut, effect] of why.paths) {
      const name = nameElement('div', 'nbguard-code nbguard-path');
      setName(name, path);
      const item = element('li', '', name);
      const facts = element('div', 'nbguard-dim', join([number === null ? '' : cell(number), effect]));
      if (stale) {
        facts.append(' ', element('span', 'nbguard-chip nbguard-warn', trans.__('stale')));
      }
      if (facts.hasChildNodes()) {
        item.append(facts);
      }
      if (cut !== '') {
        item.append(codeLine(cut, trans));
      }
      list.append(item);
    }
    for (const [root, count] of why.more) {
      const words = count === 1 ? trans.__('1 more path') : trans.__('%1 more paths', count);
      list.append(element('li', 'nbguard-dim', join([root, words])));
    }
    return list;
  }
}
