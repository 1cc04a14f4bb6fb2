/** What the kernel answers to a question about one row, under it. */

import type { Progress } from './connection';
import { element, setText, show } from './dom';
import type { ViewContext } from './view_context';
import { ways } from './why';

export type Topic = 'why' | 'predict';

export class AnswerPanel {
  readonly node = element('div', 'why');
  /** What was asked; null: nothing, and nothing is shown. */
  topic: Topic | null = null;
  #rid = '';
  readonly #note = element('div', 'dim');
  readonly #body = element('div');

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.node.setAttribute('role', 'group');
    this.node.append(this.#note, this.#body);
    this.close();
  }

  /** Ask about row `id` of heap `heap`; until the answer is there, an earlier one to the same question stays. */
  open(topic: Topic, heap: number, id: number): void {
    if (topic !== this.topic) {
      this.close();
    }
    this.topic = topic;
    show(this.node, true);
    setText(this.#note, this.#body.childElementCount ? '' : this.#context.trans.__('working…'));
    const rid = this.#context.connection.ask({ op: topic, heap, id }, progress => {
      if (this.#rid === rid) {
        this.#hear(progress);
      }
    });
    this.#rid = rid;
  }

  close(): void {
    this.#rid = '';
    setText(this.#note, '');
    this.topic = null;
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
        setText(this.#note, progress.why || trans.__('runs when the cell ends'));
        break;
      case 'refused':
        setText(this.#note, progress.why);
        break;
      case 'lost':
        setText(this.#note, trans.__('The kernel was restarted.'));
        break;
      case 'why':
        setText(this.#note, '');
        this.#body.replaceChildren(ways(progress.why, trans));
        break;
      case 'predicted':
        setText(this.#note, progress.text);
        break;
      default:
        break;
    }
  }
}
