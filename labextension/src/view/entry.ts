/** One row of the list of holders: two lines, what can be done about it, and its parts when it is unfolded. */

import type { ViewContext } from './view_context';
import { button, cut, element, type ItemView, KeyedList, nameElement, setAttribute, setClass, setName, setText, show } from './dom';
import type { Entry } from './entries';
import { RowActions, type Target } from './row_actions';
import { canGo, type Selection } from './selection';
import { formatBytes } from './bytes';
import { cell } from './words';

export interface EntryItem {
  entry: Entry;
  figure: string;
  /** Figures of the lines under it. */
  figures: readonly string[];
  heap: number;
}

export class EntryView implements ItemView<EntryItem> {
  readonly node = element('tbody');
  readonly #name: NameView;
  readonly #cell = element('td', 'col-cell dim');
  readonly #figure = element('td', 'figure');
  readonly #words = nameElement('span', 'dim');
  readonly #chip = element('span');
  readonly #actions: RowActions;
  readonly #toggle: HTMLButtonElement;
  readonly #children: KeyedList<EntryItem>;
  #isOpen = false;
  #item: EntryItem | null = null;

  readonly #box = element('input', 'select');
  readonly #context: ViewContext;
  readonly #selection: Selection;

  constructor(context: ViewContext, selection: Selection) {
    this.#context = context;
    this.#selection = selection;
    this.#actions = new RowActions(context);
    this.#box.type = 'checkbox';
    this.#box.dataset.kind = 'select';
    this.#box.addEventListener('change', () => {
      if (this.#item !== null) {
        selection.toggle(this.#item.entry, this.#box.checked);
      }
    });
    this.#actions.node.prepend(this.#box);
    const head = element('th', 'col-label');
    this.#name = new NameView(context, head);
    this.#toggle = button('fold', '', () => {
      this.#isOpen = !this.#isOpen;
      this.#draw();
    });
    head.append(this.#toggle, this.#name.node);
    head.scope = 'row';
    const line = element('div', 'row-words', this.#words, this.#chip, this.#actions.node);
    const words = element('td', '', line, this.#actions.answer.node);
    words.colSpan = 3;
    const second = element('tr', '', words);
    this.node.append(element('tr', '', head, this.#cell, this.#figure), second);
    this.#children = new KeyedList<EntryItem>(
      this.node,
      ({ entry }) => entry.key,
      () => new PartView(context),
      second
    );
  }

  update(item: EntryItem): void {
    this.#item = item;
    this.#draw();
  }

  #draw(): void {
    if (this.#item === null) {
      return;
    }
    const { entry, figure, figures, heap } = this.#item;
    const { trans } = this.#context;
    this.#name.update(entry);
    setText(this.#cell, entry.cell === null ? '' : cell(entry.cell));
    setText(this.#figure, figure);
    setAttribute(this.#figure, 'title', entry.atLeast ? trans.__('at least: not all of it was looked into') : null);
    setName(this.#words, entry.words);
    chip(this.#chip, entry, this.#context);
    show(this.#actions.node, entry.target !== null);
    this.#actions.update(targetOf(entry, heap));
    show(this.#box, canGo(entry));
    this.#box.checked = this.#selection.has(entry);
    setAttribute(this.#box, 'aria-label', trans.__('select %1', cut(entry.name)));
    const isFolded = entry.children.length > 0;
    show(this.#toggle, isFolded);
    setAttribute(this.#toggle, 'aria-expanded', isFolded ? String(this.#isOpen) : null);
    setAttribute(this.#toggle, 'aria-label', trans.__('parts of %1', cut(entry.name)));
    const shown = this.#isOpen ? entry.children : [];
    this.#children.update(shown.map((child, i) => ({ entry: child, figure: figures[i] ?? '', figures: [], heap })));
  }
}

/** A line under a row: a part of its bytes, or one of those that it stands for. */
class PartView implements ItemView<EntryItem> {
  readonly node = element('tr', 'part');
  readonly #name: NameView;
  readonly #words = nameElement('span', 'dim');
  readonly #figure = element('td', 'figure');
  readonly #chip = element('span');
  readonly #line: HTMLElement;
  readonly #actions: RowActions;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.#actions = new RowActions(context);
    const head = element('th', 'col-label');
    this.#name = new NameView(context, head);
    this.#line = element('div', 'row-words', this.#words, this.#chip, this.#actions.node);
    head.append(this.#name.node, this.#line, this.#actions.answer.node);
    head.scope = 'row';
    head.colSpan = 2;
    this.node.append(head, this.#figure);
  }

  update({ entry, figure, heap }: EntryItem): void {
    this.#name.update(entry);
    setText(this.#figure, figure);
    setName(this.#words, entry.words);
    chip(this.#chip, entry, this.#context);
    show(this.#actions.node, entry.target !== null);
    this.#actions.update(targetOf(entry, heap));
    show(this.#line, entry.words !== '' || entry.stale > 0 || entry.target !== null);
  }
}

function targetOf({ target }: Entry, heap: number): Target {
  return target === null ? { id: null, label: '', heap, can: [] } : { ...target, heap };
}

/** What a row is beside its bytes: an experiment that trains or is parked; stale, all of it or a part. */
function chip(node: HTMLElement, { state, stale, nbytes }: Entry, { trans }: ViewContext): void {
  const isStale = stale > 0 || state === 'stale';
  const partly = stale > 0 && stale < nbytes ? trans.__('%1 stale', formatBytes(stale)) : trans.__('stale');
  setText(node, isStale ? partly : trans.__(state));
  setClass(node, `chip ${isStale ? 'stale' : state || 'live'}`);
  show(node, isStale || state === 'training' || state === 'parked');
}

/** A name of which the end is never lost; where the host has cells, a link to the cell that made it. */
class NameView {
  readonly node = element('span', 'ends');
  readonly #text = nameElement('span', 'code two-ends');
  readonly #link: HTMLButtonElement;
  #cell: number | null = null;

  readonly #context: ViewContext;
  readonly #head: HTMLElement;

  /** `head` is the row's header, which has the name in it. */
  constructor(
    context: ViewContext,
    head: HTMLElement
  ) {
    this.#context = context;
    this.#head = head;
    this.#link = button('link goto', '', () => {
      if (this.#cell !== null && context.goToCell?.(this.#cell) === false) {
        setAttribute(this.#link, 'title', context.trans.__('%1 is not in the notebook any more', cell(this.#cell)));
      }
    });
    this.node.append(this.#text);
  }

  update(entry: Entry): void {
    const { trans, goToCell } = this.#context;
    setName(this.#text, entry.name);
    setAttribute(this.#head, 'aria-label', cut(entry.name)); // a screen reader may take its two ends for two words
    this.#cell = goToCell === undefined ? null : entry.cell;
    const parent = this.#cell === null ? this.node : this.#link;
    if (this.#text.parentElement !== parent) {
      this.node.replaceChildren(...(this.#cell === null ? [] : [this.#link]));
      parent.append(this.#text);
    }
    if (this.#cell !== null) {
      const words = trans.__('go to %1, which made %2', cell(this.#cell), cut(entry.name));
      setAttribute(this.#link, 'aria-label', words);
      setAttribute(this.#text, 'title', words);
    }
  }
}
