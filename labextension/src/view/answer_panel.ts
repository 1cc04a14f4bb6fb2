/** What the kernel answers to a question about one row, under it. */

import type { Progress } from './connection';
import { element, setText, show } from './dom';
import type { ViewContext } from './view_context';

export class AnswerPanel {
  readonly node = element('div', 'nbguard-why');
  #rid = '';
  readonly #note = element('div', 'nbguard-dim');
  readonly #body = element('div');

  readonly #context: ViewContext;
  readonly #question: 'why' | 'foresee';
  readonly #draw: (answer: Progress) => HTMLElement | null;

  /** `draw` makes an element of the answer; null: it is another message. */
  constructor(context: ViewContext, question: 'why' | 'foresee', draw: (answer: Progress) => HTMLElement | null) {
    this.#context = context;
    this.#question = question;
    this.#draw = draw;
    this.node.hidden = true;
    this.node.setAttribute('role', 'group');
    this.node.append(this.#note, this.#body);
  }

  get isOpen(): boolean {
    return !this.node.hidden;
  }

  /** Ask about row `id` of heap `heap`; until the answer is there, an earlier one stays. */
  open(heap: number, id: number): void {
    show(this.node, true);
    setText(this.#note, this.#body.childElementCount ? '' : this.#context.trans.__('working…'));
    const rid = this.#context.connection.ask({ op: this.#question, heap, id }, progress => {
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
      default: {
        const answer = this.#draw(progress);
        if (answer !== null) {
          setText(this.#note, '');
          this.#body.replaceChildren(answer);
        }
      }
    }
  }
}
