/** Arrow keys in a table whose rows have buttons: up and down between rows, left and right in one. Tab stops at one row only. */

export class RowsKeyboard {
  readonly #table: HTMLTableElement;
  #current: HTMLElement | null = null;

  constructor(table: HTMLTableElement) {
    this.#table = table;
    table.addEventListener('keydown', event => {
      this.#onKey(event);
    });
    table.addEventListener('focusin', event => {
      const row = (event.target as Element).closest('tbody');
      if (row !== null && row !== this.#current) {
        this.#current = row;
        this.update();
      }
    });
  }

  /** Take rows and buttons as they are now. */
  update(): void {
    const rows = this.#rows();
    this.#current = this.#current !== null && rows.includes(this.#current as HTMLTableSectionElement) ? this.#current : (rows[0] ?? null);
    for (const row of rows) {
      for (const control of controls(row)) {
        control.tabIndex = row === this.#current ? 0 : -1;
      }
    }
  }

  #rows(): HTMLTableSectionElement[] {
    return [...this.#table.tBodies];
  }

  #onKey(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    const row = target.closest('tbody');
    if (row === null || event.altKey || event.ctrlKey || event.metaKey) {
      return;
    }
    const next = this.#next(event.key, row, target);
    if (next !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      next.focus();
    }
  }

  #next(key: string, row: HTMLTableSectionElement, target: HTMLElement): HTMLElement | undefined {
    const rows = this.#rows();
    const own = controls(row);
    const at = own.indexOf(target);
    const to: Record<string, HTMLTableSectionElement | undefined> = {
      ArrowDown: rows[rows.indexOf(row) + 1],
      ArrowUp: rows[rows.indexOf(row) - 1],
      Home: rows[0],
      End: rows[rows.length - 1]
    };
    if (key === 'ArrowRight' || key === 'ArrowLeft') {
      return own[at + (key === 'ArrowRight' ? 1 : -1)];
    }
    const there = to[key];
    const found = there === undefined ? [] : controls(there);
    return found.find(each => kind(each) === kind(target)) ?? found[0];
  }
}

function controls(row: Element): HTMLElement[] {
  return [...row.querySelectorAll<HTMLElement>('button, input')].filter(each => each.closest('[hidden]') === null);
}

/** What a control does, for the same one in another row. */
function kind(control: HTMLElement): string {
  return control.dataset.kind ?? control.className;
}
