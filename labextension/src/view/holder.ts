/** One row of the table of holders, with what can be done about it. */

import type { ViewContext } from './view_context';
import { element, type ItemView, nameElement, setName, setText, show } from './dom';
import type { HolderRow } from './protocol';
import { RowActions } from './row_actions';
import { cell, join } from './words';

export interface HolderItem {
  row: HolderRow;
  figure: string;
  heap: number;
  /** Whether there are several devices, so that the row has to say which. */
  isNamed: boolean;
}

export class HolderView implements ItemView<HolderItem> {
  readonly node = element('tbody');
  private readonly name = nameElement('span', 'nbguard-code');
  private readonly cell = element('td', 'nbguard-col-cell nbguard-dim');
  private readonly figure = element('td', 'nbguard-figure');
  private readonly what = nameElement('span', 'nbguard-dim');
  private readonly chip = element('span', 'nbguard-chip nbguard-stale');
  private readonly actions: RowActions;

  constructor(context: ViewContext) {
    this.chip.textContent = context.trans.__('stale');
    this.actions = new RowActions(context);
    const head = element('th', 'nbguard-col-label', this.name);
    head.scope = 'row';
    const line = element('div', 'nbguard-row-words', this.what, this.chip, this.actions.node);
    const words = element('td', '', line, this.actions.why.node);
    words.colSpan = 3;
    this.node.append(element('tr', '', head, this.cell, this.figure), element('tr', '', words));
  }

  update({ row, figure, heap, isNamed }: HolderItem): void {
    const isPath = row.path.startsWith(row.label);
    setName(this.name, isPath ? row.path : row.label);
    setText(this.cell, row.cell === null ? '' : cell(row.cell));
    setText(this.figure, figure);
    setName(this.what, join([row.what, isPath ? '' : row.path, isNamed ? row.device : '']));
    show(this.chip, row.stale);
    this.actions.update({ ...row, heap });
  }
}
