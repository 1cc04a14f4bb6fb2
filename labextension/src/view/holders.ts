/** Who holds the memory: one list to sort and to search, whose bytes add up to what is allocated. */

import { isLooked } from './as_of';
import { RowsKeyboard } from './rows_keyboard';
import { Selection } from './selection';
import { formatBytes, formatColumn, unitOf } from './bytes';
import type { ViewContext } from './view_context';
import { button, element, KeyedList, setAttribute, setText, show } from './dom';
import { type Entry, entriesOf, sumOf } from './entries';
import { type EntryItem, EntryView } from './entry';
import type { MemoryState, Tick } from './protocol';
import type { Trans } from './words';

const SHOWN = 10;
const MORE = 100;

type Column = 'label' | 'cell' | 'nbytes';

export class HoldersSection {
  readonly node = element('section', 'section holders');
  readonly #table = element('table', 'table');
  readonly #filter = element('input', 'filter');
  readonly #more: HTMLButtonElement;
  readonly #rest = element('div', 'rest dim');
  readonly #count = element('span');
  readonly #none = element('div', 'dim');
  readonly #sum = element('th');
  readonly #total = element('td', 'figure');
  readonly #foot = element('tfoot');
  readonly #list: KeyedList<EntryItem>;
  readonly #heads = new Map<Column, HTMLTableCellElement>();
  readonly #keyboard = new RowsKeyboard(this.#table);
  readonly #selection: Selection;
  #heap: MemoryState | null = null;
  /** Name of the Learner that a fit runs on; null: none does. */
  #training: string | null = null;
  #tracked = '';
  #order: Column = 'nbytes';
  #isReversed = false;
  #shown = SHOWN;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    const { trans } = context;
    this.#selection = new Selection(context, () => {
      this.#draw();
    });
    const head = this.#head();
    this.#table.append(head);
    this.#list = new KeyedList<EntryItem>(
      this.#table,
      ({ entry }) => entry.key,
      () => new EntryView(context, this.#selection),
      head
    );
    this.#filter.type = 'search';
    this.#filter.placeholder = trans.__('Filter');
    this.#filter.setAttribute('aria-label', trans.__('Filter who holds memory'));
    this.#filter.addEventListener('input', () => {
      this.#shown = SHOWN;
      this.#draw();
    });
    this.#more = button('link', '', () => {
      this.#shown += MORE;
      this.#draw();
    });
    this.#rest.append(this.#count, this.#more);
    this.#sum.scope = 'row';
    this.#sum.colSpan = 2;
    this.#foot.append(element('tr', '', this.#sum, this.#total));
    this.#table.append(this.#foot);
    this.#table.setAttribute('aria-label', trans.__('Who holds memory. Arrow keys go from row to row.'));
    const title = element('h3', 'title', trans.__('Held by'));
    this.node.append(
      element('div', 'title-line', title, context.asOf.label(), this.#filter),
      this.#selection.node,
      this.#table,
      this.#none,
      this.#rest
    );
    this.#draw();
  }

  update(heap: MemoryState | null): void {
    this.#heap = heap;
    this.#draw();
  }

  /** Take what a tick knows sooner than a heap: which Learner trains, and whose memory is tracked. */
  follow({ fit, tracked }: Tick): void {
    const training = fit?.label ?? null;
    if (training !== this.#training || tracked !== this.#tracked) {
      this.#training = training;
      this.#tracked = tracked;
      this.#draw();
    }
  }

  #draw(): void {
    const { trans } = this.#context;
    const heap = this.#heap;
    const entries = heap === null ? [] : entriesOf(heap, this.#training, trans);
    const found = this.#sorted(entries.filter(entry => matches(entry, this.#filter.value)));
    const shown = found.slice(0, this.#shown);
    const all = sumOf(entries) + (heap?.more[1] ?? 0);
    show(this.node, heap !== null);
    show(this.#filter, entries.length > 8);
    show(this.#table, found.length > 0);
    this.#selection.update(entries, heap?.heap ?? -1);
    this.#list.update(this.#items(shown, all, heap?.heap ?? -1));
    this.#keyboard.update();
    const unit = unitOf(all);
    const [figure = '', part = ''] = [all, sumOf(found)].flatMap(nbytes => formatColumn([nbytes], unit));
    const isFiltered = this.#filter.value.trim() !== '';
    const some = trans.__('%1 shown · %2 of', found.length.toLocaleString('en'), part);
    setText(this.#sum, isFiltered ? some : trans.__('Total'));
    setText(this.#total, figure);
    show(this.#none, found.length === 0);
    const nothing = isLooked(heap) ? nothingHeld(this.#tracked, trans) : trans.__('Not looked at yet.');
    setText(this.#none, entries.length ? trans.__('Nothing matches.') : nothing);
    this.#drawRest(found.slice(shown.length));
    this.#drawHeads();
  }

  /** The rows with their figures in the unit of the total; what is not shown is part of the sum that is rounded. */
  #items(shown: readonly Entry[], all: number, heap: number): EntryItem[] {
    const unit = unitOf(all);
    const figures = formatColumn([...shown.map(entry => entry.nbytes), all - sumOf(shown)], unit);
    return shown.map((entry, i) => {
      const parts = formatColumn(
        entry.children.map(child => Math.max(0, child.nbytes)),
        unit
      );
      return {
        entry,
        figure: least(entry, figures[i] ?? ''),
        figures: parts.map((part, k) => ((entry.children[k]?.nbytes ?? -1) < 0 ? '' : part)),
        heap
      };
    });
  }

  /** Say what is not listed: rows that are still to be shown, and those that the kernel has added up. */
  #drawRest(hidden: readonly Entry[]): void {
    const [count, nbytes] = this.#heap?.more ?? [0, 0];
    const all = count + hidden.length;
    const bytes = nbytes + sumOf(hidden);
    show(this.#rest, all > 0);
    show(this.#more, hidden.length > 0);
    setText(this.#more, this.#context.trans.__('show %1 more', Math.min(hidden.length, MORE)));
    setText(this.#count, this.#context.trans.__('%1 not shown · %2', all.toLocaleString('en'), formatBytes(bytes)));
  }

  #sorted(entries: Entry[]): Entry[] {
    const sign = this.#isReversed ? -1 : 1;
    const compare: Record<Column, (a: Entry, b: Entry) => number> = {
      label: (a, b) => a.name.localeCompare(b.name),
      cell: (a, b) => (b.cell ?? -1) - (a.cell ?? -1),
      nbytes: (a, b) => Number(isLast(a)) - Number(isLast(b)) || b.nbytes - a.nbytes
    };
    return entries.sort((a, b) => sign * compare[this.#order](a, b));
  }

  #head(): HTMLElement {
    const { trans } = this.#context;
    const row = element('tr');
    const columns: [Column, string, string][] = [
      ['label', trans.__('Name'), ''],
      ['cell', trans.__('Cell'), trans.__('the last cell that assigned the name, displayed the result or raised the error')],
      ['nbytes', trans.__('Frees'), trans.__('the bytes that the release of each row gives back; they add up to the total')]
    ];
    for (const [column, words, title] of columns) {
      const sort = button('sort', words, () => {
        this.#isReversed = this.#order === column && !this.#isReversed;
        this.#order = column;
        this.#draw();
      });
      setAttribute(sort, 'title', title || null);
      const head = element('th', `col-${column}`, sort);
      head.scope = 'col';
      this.#heads.set(column, head);
      row.append(head);
    }
    return element('thead', '', row);
  }

  #drawHeads(): void {
    for (const [column, head] of this.#heads) {
      const ascends = (column === 'label') !== this.#isReversed;
      setAttribute(head, 'aria-sort', column !== this.#order ? null : ascends ? 'ascending' : 'descending');
    }
  }
}

/** What is folded comes last: small holders and frames are there for completeness, and parked experiments hold nothing here. */
function isLast({ state, key }: Entry): boolean {
  return key === 'frames' || key === 'small' || state === 'parked';
}

/** That nothing is held, where what is tracked is memory of a GPU or of the host. */
function nothingHeld(tracked: string, trans: Trans): string {
  return tracked === 'cpu' || tracked === 'simulated' ? trans.__('No tensor is held in memory.') : trans.__('Nothing holds memory of a device.');
}

function least(entry: Entry, figure: string): string {
  return entry.atLeast ? `≥ ${figure}` : figure;
}

function matches(entry: Entry, wanted: string): boolean {
  const text = wanted.trim().toLowerCase();
  const is = (part: string): boolean => part.toLowerCase().includes(text);
  return text === '' || is(entry.name) || is(entry.words) || entry.children.some(child => is(child.name) || is(child.words));
}
