/** The date of figures that come from a look at the heap: after which cell, in the middle of which, or at what time. */

import { element, setText } from './dom';
import { clock } from './line_drawing';
import type { MemoryState, Tick } from './protocol';
import { cell, type Trans } from './words';

/** The state's date in words: `after In[3]`, `during In[11]`, `as of 12:03:05`. A tick may know that it holds after a later cell. */
export function asOf(state: MemoryState, tick: Tick | null, trans: Trans): string {
  if (state.during !== null) {
    return trans.__('during %1', cell(state.during));
  }
  const confirmed = tick !== null && tick.boot === state.boot && tick.heap === state.heap ? tick.heap_cell : null;
  const after = confirmed ?? state.cell;
  if (after !== null && isBehind(state, tick)) {
    return trans.__('not looked at since %1', cell(after));
  }
  return after === null ? trans.__('as of %1', clock(state.t, true)) : trans.__('after %1', cell(after));
}

/** Whether cells have ended since the look at the heap: during a Run All it comes after some of them only. */
export function isBehind(state: MemoryState | null, tick: Tick | null): boolean {
  const last = tick?.heap_cell ?? state?.cell ?? null;
  const running = tick?.cell ?? null;
  return running !== null && last !== null && last < running - 1;
}

/** Whether anybody has looked at the heap yet: the state before the first look knows nothing of it. */
export function isLooked(state: MemoryState | null): state is MemoryState {
  return state !== null && state.heap > 0;
}

/** Labels with the date of the last state, wherever its figures stand. Sections with one are dimmed while cells have ended since. */
export class AsOf {
  readonly #labels: HTMLElement[] = [];
  #words = '';

  readonly #trans: Trans;

  constructor(trans: Trans) {
    this.#trans = trans;
  }

  /** A new label. */
  label(): HTMLElement {
    const label = element('span', 'as-of dim', this.#words);
    this.#labels.push(label);
    return label;
  }

  /** Put the date beside the headings of sections: their first elements. */
  date(...sections: readonly HTMLElement[]): void {
    for (const section of sections) {
      const title = section.firstElementChild;
      const line = element('div', 'title-line');
      title?.replaceWith(line);
      line.append(...(title === null ? [] : [title]), this.label());
    }
  }

  update(state: MemoryState | null, tick: Tick | null): void {
    this.#words = isLooked(state) ? asOf(state, tick, this.#trans) : '';
    const behind = isLooked(state) && isBehind(state, tick);
    for (const label of this.#labels) {
      setText(label, this.#words);
      label.closest('section')?.classList.toggle('nbguard-behind', behind);
    }
  }
}
