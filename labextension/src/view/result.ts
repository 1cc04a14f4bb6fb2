/** What the last operation came to. The one part of the view that is read out when it changes. */

import type { ViewContext } from './view_context';
import { button, cut, element, sentenceElement } from './dom';
import type { Result } from './operations';
import type { OutcomeView, Tick } from './protocol';

/** After this long (milliseconds) what was done is no longer news. */
const NEWS_FOR = 30_000;

export class ResultPanel {
  readonly node = element('div', 'result');
  #result: Result | null = null;
  #since = 0;
  /** Number of the cell that ran when the result came, and when that was by the kernel's clock. */
  #ranThen: number | null = null;
  #at = 0;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.node.setAttribute('aria-live', 'polite');
  }

  update(): void {
    const { result } = this.#context.operations;
    if (result !== this.#result) {
      this.#result = result;
      this.#since = Date.now();
      this.#ranThen = this.#context.connection.tick?.cell ?? null;
      this.#at = this.#context.connection.tick?.t ?? 0;
      this.node.replaceChildren(...(result === null ? [] : [this.#section(result)]));
    }
  }

  /** Take what was done off after the next cell or 30 s, unless the reader is at it. */
  follow(tick: Tick): void {
    const hasBegun = tick.cell === null ? tick.marks.some(mark => mark.t > this.#at) : tick.cell !== this.#ranThen;
    const isNews = Date.now() - this.#since < NEWS_FOR && !hasBegun;
    if (this.#result?.kind === 'done' && !isNews && !this.node.matches(':hover, :focus-within')) {
      this.#context.operations.dismiss();
    }
  }

  #section(result: Result): HTMLElement {
    const { trans, operations } = this.#context;
    const title = element('h3', 'title', result.kind === 'done' ? trans.__('Just done') : trans.__('Not done'));
    const close = button('close', '×', () => {
      operations.dismiss();
    });
    close.setAttribute('aria-label', trans.__('Dismiss what was done'));
    const body = result.kind === 'done' ? this.#done(result.outcome) : [sentenceElement('div', `${result.title}: ${result.why}`)];
    return element('section', 'section', element('div', 'title-line', title, close), ...body);
  }

  #done(outcome: OutcomeView): Node[] {
    const { trans, operations } = this.#context;
    const sentence = sentenceElement('div', outcome.sentence);
    if (outcome.undo.length) {
      const undo = button('link', trans.__('undo'), () => {
        operations.start({ action: 'unpark', title: trans.__('undo'), names: outcome.undo });
      });
      undo.title = trans.__('Bring back %1', cut(outcome.undo.join(', ')));
      sentence.append(' ', undo);
    }
    const steps = outcome.done.map(step => element('li', 'wrap', cut(step)));
    const undone = outcome.undone.map(([what, why]) => element('li', 'wrap', `${cut(what)}: ${why}`));
    const lists = [steps, undone].filter(items => items.length > 0);
    return [sentence, ...lists.map(items => element('ul', 'dim skipped', ...items))];
  }
}
