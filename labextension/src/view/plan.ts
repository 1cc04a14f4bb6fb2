/** The plan on the table: what would be done, step by step, until it is agreed to or given up. */

import { formatBytes, formatColumn } from './bytes';
import type { ViewContext } from './view_context';
import { button, element, type ItemView, KeyedList, nameElement } from './dom';
import { setAttribute, setClass, setEnabled, setName, setText, show } from './dom';
import type { Operation } from './operations';
import type { PlanRow, PlanView } from './protocol';
import { sentence } from './words';

interface StepItem extends PlanRow {
  figure: string;
}

let panels = 0;

export class PlanPanel {
  readonly node = element('section', 'section plan');
  readonly #title = element('h3', 'title plain');
  readonly #revised = element('div', 'warning');
  readonly #rows = element('ul', 'steps');
  readonly #irreversible = element('div', 'warning');
  readonly #refused = element('div', 'wrap');
  readonly #when = element('div', 'when dim wrap');
  readonly #skipped = element('ul', 'dim skipped');
  readonly #confirm: HTMLButtonElement;
  readonly #cancel: HTMLButtonElement;
  readonly #steps: KeyedList<StepItem>;
  #operation: Operation | null = null;
  #before: Element | null = null;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    const { trans } = context;
    this.#confirm = button('primary', '', () => {
      this.#act(operation => {
        context.operations.confirm(operation);
      });
    });
    this.#cancel = button('', trans.__('Cancel'), () => {
      this.#act(operation => {
        context.operations.cancel(operation);
      });
    });
    this.#steps = new KeyedList<StepItem>(
      this.#rows,
      row => row.key || row.label,
      () => this.#step()
    );
    this.#title.id = `nbguard-plan-${++panels}`;
    this.node.setAttribute('role', 'group');
    this.node.setAttribute('aria-labelledby', this.#title.id);
    this.node.tabIndex = -1;
    this.node.hidden = true;
    setText(this.#revised, trans.__('The plan has changed since. Look at it again.'));
    const scroll = element('div', 'plan-scroll');
    scroll.append(this.#revised, this.#rows, this.#refused, this.#skipped);
    const buttons = element('div', 'buttons', this.#confirm, this.#cancel);
    this.node.append(this.#title, scroll, this.#irreversible, this.#when, buttons);
  }

  update(): void {
    const operation = this.#context.operations.open;
    const wasOpen = this.#operation !== null;
    this.#operation = operation;
    if (operation?.plan) {
      this.#draw(operation, operation.plan);
    }
    const focused = document.activeElement;
    if (operation !== null && !wasOpen) {
      this.#before = focused;
      show(this.node, true);
      this.#takeFocus(focused);
    } else if (operation === null && wasOpen) {
      const hadFocus = this.node.contains(focused);
      show(this.node, false);
      if (hadFocus && this.#before instanceof HTMLElement) {
        this.#before.focus({ preventScroll: true });
      }
    }
  }

  /** Focus the panel, as a click in it or a command has opened it, but never take the focus from where the reader types by now. */
  #takeFocus(focused: Element | null): void {
    if (focused === null || focused.contains(this.node) || this.node.closest('.nbguard-view')?.contains(focused)) {
      this.node.focus({ preventScroll: true });
    }
  }

  #act(does: (operation: Operation) => void): void {
    if (this.#operation !== null) {
      does(this.#operation);
    }
  }

  #draw(operation: Operation, plan: PlanView): void {
    const { trans } = this.#context;
    setText(this.#title, plan.title);
    show(this.#revised, operation.isRevised);
    this.#steps.update(withFigures(plan.rows));
    setText(this.#irreversible, plan.irreversible);
    show(this.#irreversible, plan.irreversible !== '');
    setText(this.#refused, plan.refused);
    show(this.#refused, plan.refused !== '');
    const waits = plan.when === 'now' ? '' : sentence(plan.why || trans.__('it is done when the cell ends'));
    setText(this.#when, `${trans.__('Nothing has been done yet.')} ${waits}`.trim());
    show(this.#when, plan.refused === '');
    this.#skipped.replaceChildren(...plan.skipped.map(note => element('li', '', note)));
    const isAsked = operation.stage === 'applying' || (plan.token === '' && plan.refused === '');
    setText(this.#confirm, isAsked ? trans.__('working…') : plan.confirm);
    setEnabled(this.#confirm, !isAsked);
    show(this.#confirm, plan.refused === '');
  }

  #step(): ItemView<StepItem> {
    let key = '';
    const box = element('input');
    box.type = 'checkbox';
    box.addEventListener('change', () => {
      this.#act(operation => {
        this.#context.operations.toggle(operation, key, !box.checked);
      });
    });
    const label = nameElement('span', 'wrap');
    const figure = element('span', 'figure');
    const detail = nameElement('small', 'dim wrap');
    return {
      node: element('li', '', element('label', 'step', box, label, figure, detail)),
      update: row => {
        key = row.key;
        box.disabled = key === '';
        box.checked = !row.kept;
        setAttribute(box, 'title', key === '' ? this.#context.trans.__('part of this plan: it cannot be left out') : null);
        setName(label, row.label);
        setText(figure, row.figure);
        setClass(figure, row.kept ? 'figure dim' : 'figure');
        setName(detail, row.detail);
        show(detail, row.detail !== '');
      }
    };
  }
}

/** The rows with their bytes in one unit; those that are left out are not part of the sum. */
function withFigures(rows: readonly PlanRow[]): StepItem[] {
  const done = rows.filter(row => !row.kept && row.nbytes !== null);
  const figures = formatColumn(done.map(row => row.nbytes ?? 0));
  return rows.map(row => {
    const alone = row.nbytes === null ? '' : formatBytes(row.nbytes);
    return { ...row, figure: figures[done.indexOf(row)] ?? alone };
  });
}
