/** What to do about it: after running out of memory, and what was found in passing. */

import { formatBytes } from './bytes';
import { codeLine } from './code';
import { element, nameElement, sentenceElement, setClass, show } from './dom';
import type { FitTick, FixRow, MemoryState, OomView } from './protocol';
import type { Trans } from './words';

/** A section whose content is made anew only when it differs. */
abstract class Advice<T> {
  readonly node = element('section', 'section');
  readonly #body = element('div');
  #shown = '';

  constructor(protected readonly title: string) {
    this.node.append(element('h3', 'title', title), this.#body);
    show(this.node, false);
  }

  protected abstract draw(advice: T): Node[];

  protected set(advice: T | null): void {
    const text = JSON.stringify(advice);
    show(this.node, advice !== null);
    if (text !== this.#shown) {
      this.#shown = text;
      this.#body.replaceChildren(...(advice === null ? [] : this.draw(advice)));
    }
  }
}

export class OomSection extends Advice<OomView> {
  readonly #trans: Trans;

  constructor(trans: Trans) {
    super(trans.__('Out of memory'));
    this.#trans = trans;
    setClass(this.node, 'section oom');
  }

  update(heap: MemoryState | null): void {
    this.set(heap?.oom ?? null);
  }

  protected draw(oom: OomView): Node[] {
    const title = nameElement('div', 'strong wrap');
    title.textContent = oom.title;
    show(title, oom.title !== this.title);
    return [title, sentenceElement('div', oom.sentence), element('ol', 'rows', ...oom.fixes.map(fix => this.#fix(fix)))];
  }

  #fix({ words, nbytes, commands }: FixRow): HTMLElement {
    const figure = element('span', 'figure', nbytes === null ? '' : `+${formatBytes(nbytes)}`);
    const lines = commands.map(command => codeLine(command, this.#trans));
    return element('li', 'row', element('div', 'row-head', figure, sentenceElement('span', words)), ...lines);
  }
}

export class FindingsSection extends Advice<MemoryState['findings']> {
  #heap: MemoryState | null = null;
  /** Name of the Learner that a fit runs on; null: none does. */
  #training: string | null = null;

  readonly #trans: Trans;

  constructor(trans: Trans) {
    super(trans.__('Findings'));
    this.#trans = trans;
  }

  update(heap: MemoryState | null): void {
    this.#heap = heap;
    const findings = [...(heap?.notices ?? []), ...(heap?.findings ?? [])].filter(([, , learner]) => learner === '' || learner !== this.#training);
    this.set(findings.length > 0 ? findings : null);
  }

  /** Take what a tick knows sooner than a heap: a Learner on which a fit runs needs what an idle one keeps. */
  follow(fit: FitTick | null): void {
    const training = fit?.label ?? null;
    if (training !== this.#training) {
      this.#training = training;
      this.update(this.#heap);
    }
  }

  protected draw(findings: MemoryState['findings']): Node[] {
    const rows = findings.map(([sentence, command]) => {
      const isSaid = command === '' || sentence.includes(`\`${command}\``);
      return element('li', 'row', sentenceElement('div', sentence), ...(isSaid ? [] : [codeLine(command, this.#trans)]));
    });
    return [element('ul', 'rows', ...rows)];
  }
}
