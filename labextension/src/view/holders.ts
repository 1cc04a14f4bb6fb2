/** Who holds the memory: a table to sort and to search, with the ways that keep each row alive. */

import { formatBytes, formatColumn } from './bytes';
import type { ViewContext } from './view_context';
import { button, element, KeyedList, setAttribute, setText, show } from './dom';
import { HolderView, type HolderItem } from './holder';
import type { MemoryState, HolderRow } from './protocol';

const SHOWN = 10;
const MORE = 100;

type Column = 'label' | 'cell' | 'nbytes';

export class HoldersSection {
  readonly node = element('section', 'nbguard-section');
  private readonly table = element('table', 'nbguard-table');
  private readonly filter = element('input', 'nbguard-filter');
  private readonly more: HTMLButtonElement;
  private readonly rest = element('div', 'nbguard-rest nbguard-dim');
  private readonly count = element('span');
  private readonly none = element('div', 'nbguard-dim');
  private readonly list: KeyedList<HolderItem>;
  private readonly heads = new Map<Column, HTMLTableCellElement>();
  private heap: MemoryState | null = null;
  private order: Column = 'nbytes';
  private isReversed = false;
  private shown = SHOWN;

  constructor(private readonly context: ViewContext) {
    const { trans } = context;
    const head = this.head();
    this.table.append(head);
    this.list = new KeyedList<HolderItem>(
      this.table,
      ({ row }) => `${row.device}\n${row.path}\n${row.label}`,
      () => new HolderView(context),
      head
    );
    this.filter.type = 'search';
    this.filter.placeholder = trans.__('Filter');
    this.filter.setAttribute('aria-label', trans.__('Filter who holds memory'));
    this.filter.addEventListener('input', () => {
      this.shown = SHOWN;
      this.draw();
    });
    this.more = button('nbguard-link', '', () => {
      this.shown += MORE;
      this.draw();
    });
    this.rest.append(this.count, this.more);
    const title = element('h3', 'nbguard-title', trans.__('Held by'));
    this.node.append(
      element('div', 'nbguard-title-line', title, context.asOf.label(), this.filter),
      this.table,
      this.none,
      this.rest
    );
  }

  update(heap: MemoryState | null): void {
    this.heap = heap;
    this.draw();
  }

  private draw(): void {
    const { trans } = this.context;
    const holders = this.heap?.holders ?? [];
    const found = this.sorted(holders.filter(row => matches(row, this.filter.value)));
    const shown = found.slice(0, this.shown);
    show(this.node, this.heap !== null);
    show(this.filter, holders.length > 8);
    show(this.table, found.length > 0);
    const figures = formatColumn(shown.map(row => row.nbytes));
    const heap = this.heap?.heap ?? -1;
    const isNamed = new Set(holders.map(row => row.device)).size > 1;
    this.list.update(shown.map((row, i) => ({ row, figure: figures[i] ?? '', heap, isNamed })));
    show(this.none, found.length === 0);
    setText(this.none, holders.length ? trans.__('Nothing matches.') : trans.__('Nothing holds memory of a device.'));
    this.drawRest(found.slice(shown.length));
    this.drawHeads();
  }

  /** Say what is not listed: rows that are still to be shown, and those that the kernel has added up. */
  private drawRest(hidden: readonly HolderRow[]): void {
    const [count, nbytes] = this.heap?.more ?? [0, 0];
    const all = count + hidden.length;
    const bytes = nbytes + hidden.reduce((sum, row) => sum + row.nbytes, 0);
    show(this.rest, all > 0);
    show(this.more, hidden.length > 0);
    setText(this.more, this.context.trans.__('show %1 more', Math.min(hidden.length, MORE)));
    setText(this.count, this.context.trans.__('%1 not shown · %2', all.toLocaleString('en'), formatBytes(bytes)));
  }

  private sorted(rows: HolderRow[]): HolderRow[] {
    const sign = this.isReversed ? -1 : 1;
    const compare: Record<Column, (a: HolderRow, b: HolderRow) => number> = {
      label: (a, b) => a.label.localeCompare(b.label),
      cell: (a, b) => (b.cell ?? -1) - (a.cell ?? -1),
      nbytes: (a, b) => b.nbytes - a.nbytes
    };
    return rows.sort((a, b) => sign * compare[this.order](a, b));
  }

  private head(): HTMLElement {
    const { trans } = this.context;
    const row = element('tr');
    const columns: [Column, string, string][] = [
      ['label', trans.__('Name'), ''],
      ['cell', trans.__('Cell'), trans.__('the last cell that bound the name, or that showed or raised it')],
      ['nbytes', trans.__('Frees'), trans.__('what comes back if this alone is let go')]
    ];
    for (const [column, words, title] of columns) {
      const sort = button('nbguard-sort', words, () => {
        this.isReversed = this.order === column && !this.isReversed;
        this.order = column;
        this.draw();
      });
      setAttribute(sort, 'title', title || null);
      const head = element('th', `nbguard-col-${column}`, sort);
      head.scope = 'col';
      this.heads.set(column, head);
      row.append(head);
    }
    return element('thead', '', row);
  }

  private drawHeads(): void {
    for (const [column, head] of this.heads) {
      const ascends = (column === 'label') !== this.isReversed;
      setAttribute(head, 'aria-sort', column !== this.order ? null : ascends ? 'ascending' : 'descending');
    }
  }
}

function matches(row: HolderRow, wanted: string): boolean {
  const text = wanted.trim().toLowerCase();
  return text === '' || [row.label, row.what, row.path].some(part => part.toLowerCase().includes(text));
}
