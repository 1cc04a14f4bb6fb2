/** What to do about it: after running out of memory, and what was found in passing. Each can be dismissed. */

import { formatBytes } from './bytes';
import { codeLine } from './code';
import type { Connection } from './connection';
import { button, element, nameElement, sentenceElement, setClass, show } from './dom';
import type { Host } from './host';
import type { FindingLine, FitTick, FixRow, MemoryState, OomView } from './protocol';
import { cell, type Trans } from './words';

/** What these sections work with. */
export interface AdviceContext {
  readonly trans: Trans;
  readonly connection: Pick<Connection, 'dismiss'>;
  readonly goToCell: Host['goToCell'];
}

/** A section whose content is made anew only when it differs. */
abstract class Advice<T> {
  readonly node = element('section', 'section');
  readonly #body = element('div');
  /** Keys of what was dismissed here: the kernel may take a moment to leave it out. */
  readonly #dismissed = new Set<string>();
  #heap: MemoryState | null = null;
  #shown = '';

  constructor(
    protected readonly title: string,
    protected readonly context: AdviceContext
  ) {
    this.node.append(element('h3', 'title', title), this.#body);
    show(this.node, false);
  }

  update(heap: MemoryState | null): void {
    this.#heap = heap;
    const advice = this.find(heap, key => !this.#dismissed.has(key));
    const text = JSON.stringify(advice);
    show(this.node, advice !== null);
    if (text !== this.#shown) {
      this.#shown = text;
      this.#body.replaceChildren(...(advice === null ? [] : this.draw(advice)));
    }
  }

  protected again(): void {
    this.update(this.#heap);
  }

  /** A button that takes off what has this key, and says what that is. */
  protected close(key: string, what: string): HTMLButtonElement {
    const close = button('close', '×', () => {
      this.#dismissed.add(key);
      this.context.connection.dismiss(key);
      this.again();
    });
    close.setAttribute('aria-label', this.context.trans.__('Dismiss: %1', what));
    close.title = this.context.trans.__('Dismiss');
    return close;
  }

  /** The number of a cell, as a link where the host has cells. */
  protected cellLink(number: number): HTMLElement {
    const { goToCell, trans } = this.context;
    if (goToCell === undefined) {
      return element('span', 'dim', cell(number));
    }
    const link = button('link', cell(number), () => {
      if (!goToCell(number)) {
        link.title = trans.__('%1 is not in the notebook any more', cell(number));
      }
    });
    link.setAttribute('aria-label', trans.__('go to %1', cell(number)));
    return link;
  }

  /** What there is to say, as far as it `isWanted`; null: nothing. */
  protected abstract find(heap: MemoryState | null, isWanted: (key: string) => boolean): T | null;

  protected abstract draw(advice: T): Node[];
}

export class OomSection extends Advice<OomView> {
  constructor(context: AdviceContext) {
    super(context.trans.__('Out of memory'), context);
    setClass(this.node, 'section oom');
  }

  protected find(heap: MemoryState | null, isWanted: (key: string) => boolean): OomView | null {
    const oom = heap?.oom ?? null;
    return oom !== null && isWanted(oom.key) ? oom : null;
  }

  protected draw(oom: OomView): Node[] {
    const title = nameElement('div', 'strong wrap');
    title.textContent = oom.title;
    const where = oom.cell === null ? [] : [this.cellLink(oom.cell)];
    const head = element('div', 'row-head', title, ...where, this.close(oom.key, oom.title));
    return [head, sentenceElement('div', oom.sentence), element('ol', 'rows', ...oom.fixes.map(fix => this.#fix(fix)))];
  }

  #fix({ words, nbytes, commands }: FixRow): HTMLElement {
    const figure = element('span', 'figure', nbytes === null ? '' : `+${formatBytes(nbytes)}`);
    const lines = commands.map(command => codeLine(command, this.context.trans));
    return element('li', 'row', element('div', 'row-flow', figure, sentenceElement('span', words)), ...lines);
  }
}

export class FindingsSection extends Advice<readonly FindingLine[]> {
  /** Name of the Learner that a fit runs on; null: none does. */
  #training: string | null = null;

  constructor(context: AdviceContext) {
    super(context.trans.__('Findings'), context);
  }

  /** Take what a tick knows sooner than a heap: a Learner on which a fit runs needs what an idle one keeps. */
  follow(fit: FitTick | null): void {
    const training = fit?.label ?? null;
    if (training !== this.#training) {
      this.#training = training;
      this.again();
    }
  }

  protected find(heap: MemoryState | null, isWanted: (key: string) => boolean): readonly FindingLine[] | null {
    const all = [...(heap?.notices ?? []), ...(heap?.findings ?? [])];
    const findings = all.filter(([, , learner, key]) => isWanted(key) && (learner === '' || learner !== this.#training));
    return findings.length > 0 ? findings : null;
  }

  protected draw(findings: readonly FindingLine[]): Node[] {
    const rows = findings.map(([sentence, command, , key, cell]) => {
      const isSaid = command === '' || sentence.includes(`\`${command}\``);
      const text = sentenceElement('div', sentence);
      const where = cell === null ? [] : [this.cellLink(cell)];
      const head = element('div', 'row-head', text, ...where, this.close(key, sentence.replaceAll('`', '')));
      return element('li', 'row', head, ...(isSaid ? [] : [codeLine(command, this.context.trans)]));
    });
    return [element('ul', 'rows', ...rows)];
  }
}
