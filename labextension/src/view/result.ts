/** What the last errand came to. The one part of the view that is read out when it changes. */

import type { Desk } from './desk';
import { button, cut, element, setSentence } from './dom';
import type { Result } from './errands';
import type { OutcomeView } from './protocol';

export class ResultPanel {
  readonly node = element('div', 'nbguard-result');
  private result: Result | null = null;

  constructor(private readonly desk: Desk) {
    this.node.setAttribute('aria-live', 'polite');
  }

  update(): void {
    const { result } = this.desk.errands;
    if (result !== this.result) {
      this.result = result;
      this.node.replaceChildren(...(result === null ? [] : [this.section(result)]));
    }
  }

  private section(result: Result): HTMLElement {
    const { trans, errands } = this.desk;
    const title = element('h3', 'nbguard-title', result.kind === 'done' ? trans.__('Just done') : trans.__('Not done'));
    const close = button('nbguard-close', '×', () => {
      errands.dismiss();
    });
    close.setAttribute('aria-label', trans.__('Dismiss'));
    const body = result.kind === 'done' ? this.done(result.outcome) : [this.sentence(`${result.title}: ${result.why}`)];
    return element('section', 'nbguard-section', element('div', 'nbguard-title-line', title, close), ...body);
  }

  private done(outcome: OutcomeView): Node[] {
    const { trans, errands } = this.desk;
    const sentence = this.sentence(outcome.sentence);
    if (outcome.undo.length) {
      const undo = button('nbguard-link', trans.__('undo'), () => {
        errands.start({ action: 'unpark', title: trans.__('undo'), names: outcome.undo });
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
