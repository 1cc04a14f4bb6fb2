/** What the last operation came to. The one part of the view that is read out when it changes. */

import type { ViewContext } from './view_context';
import { button, cut, element, setSentence } from './dom';
import type { Result } from './operations';
import type { OutcomeView } from './protocol';

export class ResultPanel {
  readonly node = element('div', 'nbguard-result');
  private result: Result | null = null;

  constructor(private readonly context: ViewContext) {
    this.node.setAttribute('aria-live', 'polite');
  }

  update(): void {
    const { result } = this.context.operations;
    if (result !== this.result) {
      this.result = result;
      this.node.replaceChildren(...(result === null ? [] : [this.section(result)]));
    }
  }

  private section(result: Result): HTMLElement {
    const { trans, operations } = this.context;
    const title = element('h3', 'nbguard-title', result.kind === 'done' ? trans.__('Just done') : trans.__('Not done'));
    const close = button('nbguard-close', '×', () => {
      operations.dismiss();
    });
    close.setAttribute('aria-label', trans.__('Dismiss'));
    const body = result.kind === 'done' ? this.done(result.outcome) : [this.sentence(`${result.title}: ${result.why}`)];
    return element('section', 'nbguard-section', element('div', 'nbguard-title-line', title, close), ...body);
  }

  private done(outcome: OutcomeView): Node[] {
    const { trans, operations } = this.context;
    const sentence = this.sentence(outcome.sentence);
    if (outcome.undo.length) {
      const undo = button('nbguard-link', trans.__('undo'), () => {
        operations.start({ action: 'unpark', title: trans.__('undo'), names: outcome.undo });
      });
      undo.title = trans.__('Bring back %1', cut(outcome.undo.join(', ')));
      sentence.append(' ', undo);
    }
    const undone = outcome.undone.map(([what, why]) => element('li', 'nbguard-wrap', `${cut(what)}: ${why}`));
    return [sentence, ...(undone.length ? [element('ul', 'nbguard-skipped', ...undone)] : [])];
  }

  private sentence(text: string): HTMLElement {
    const node = element('div', 'nbguard-wrap');
    setSentence(node, text);
    return node;
  }
}
