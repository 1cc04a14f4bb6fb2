/** Rows that are chosen to be released together, and the line that does it. */

import { formatBytes } from './bytes';
import { button, element, setText, show } from './dom';
import type { Entry } from './entries';
import type { ViewContext } from './view_context';

export class Selection {
  readonly node = element('div', 'selection');
  readonly #chosen = new Set<string>();
  readonly #words = element('span', 'grow');
  readonly #context: ViewContext;
  readonly #changed: () => void;
  #entries: readonly Entry[] = [];
  #heap = -1;

  constructor(context: ViewContext, changed: () => void) {
    this.#context = context;
    this.#changed = changed;
    const { trans } = context;
    const release = button('', trans.__('release…'), () => {
      this.#release();
    });
    release.setAttribute('aria-label', trans.__('release… what is selected'));
    const clear = button('link', trans.__('clear'), () => {
      this.clear();
    });
    clear.setAttribute('aria-label', trans.__('clear the selection'));
    this.node.append(this.#words, release, clear);
    show(this.node, false);
  }

  has(entry: Entry): boolean {
    return this.#chosen.has(entry.key);
  }

  toggle(entry: Entry, isChosen: boolean): void {
    if (isChosen) {
      this.#chosen.add(entry.key);
    } else {
      this.#chosen.delete(entry.key);
    }
    this.#changed();
  }

  clear(): void {
    this.#chosen.clear();
    this.#changed();
  }

  /** Take the rows of a heap; what is listed no longer is chosen no longer. */
  update(entries: readonly Entry[], heap: number): void {
    this.#entries = entries.filter(entry => this.has(entry) && canGo(entry));
    this.#heap = heap;
    const keys = new Set(this.#entries.map(({ key }) => key));
    for (const key of [...this.#chosen]) {
      if (!keys.has(key)) {
        this.#chosen.delete(key);
      }
    }
    const nbytes = this.#entries.reduce((sum, entry) => sum + entry.nbytes, 0);
    show(this.node, this.#entries.length > 0);
    setText(this.#words, this.#context.trans.__('%1 selected · %2', this.#entries.length, formatBytes(nbytes)));
  }

  #release(): void {
    const { operations, trans } = this.#context;
    const targets = this.#entries.map(({ target }) => target);
    const ids = targets.flatMap(target => (target?.id === null || target === null ? [] : [target.id]));
    const names = targets.map(target => target?.label ?? '').join(', ');
    operations.start({ action: 'release', title: trans.__('Release %1', names), heap: this.#heap, ids });
    this.clear();
  }
}

/** Whether a row can be released from here, and so be chosen. */
export function canGo({ target }: Entry): boolean {
  return typeof target?.id === 'number' && target.can.includes('release');
}
