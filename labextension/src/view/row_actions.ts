/** What can be done with one row: why, release…, park, unpark, next fit. */

import type { ViewContext } from './view_context';
import { button, cut, element, type ItemView, KeyedList, setAttribute, setEnabled, setText } from './dom';
import type { OperationRequest } from './operations';
import type { Ability } from './protocol';
import { AnswerPanel } from './answer_panel';
import { foreseen } from './foreseen';
import { ways } from './why';

/** A row of a heap. `id` is null for what is parked: that goes by its label. */
export interface Target {
  id: number | null;
  label: string;
  heap: number;
  can: readonly Ability[];
}

type Action = Exclude<Ability, 'why' | 'foresee'>;

function isAction(ability: Ability): ability is Action {
  return ability !== 'why' && ability !== 'foresee';
}

export class RowActions {
  readonly node = element('span', 'nbguard-row-actions');
  /** Answers to questions about the row, under it. */
  readonly answers = element('div');
  readonly #why: AnswerPanel;
  readonly #fit: AnswerPanel;
  #target: Target = { id: null, label: '', heap: -1, can: [] };
  readonly #first: KeyedList<Ability>;
  readonly #others: KeyedList<Ability>;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.#why = new AnswerPanel(context, 'why', answer => (answer.op === 'why' ? ways(answer.why, context.trans) : null));
    this.#fit = new AnswerPanel(context, 'foresee', answer => (answer.op === 'foreseen' ? foreseen(answer.fit) : null));
    this.answers.append(this.#why.node, this.#fit.node);
    const first = element('span');
    const others = element('span', 'nbguard-others');
    this.#first = this.#listIn(first);
    this.#others = this.#listIn(others);
    this.node.append(first, others);
  }

  update(target: Target): void {
    const isNew = target.heap !== this.#target.heap;
    this.#target = target;
    this.#draw();
    setAttribute(this.#why.node, 'aria-label', `${this.#words('why')} ${cut(target.label)}`);
    setAttribute(this.#fit.node, 'aria-label', `${this.#words('foresee')} ${cut(target.label)}`);
    if (isNew) {
      this.#fit.close(); // it was foreseen of another state, and nobody has asked again
    }
    if (isNew && this.#why.isOpen) {
      this.#ask(this.#why, 'why');
    }
  }

  /** One action is always there, the others where the reader points. */
  #draw(): void {
    this.#first.update(this.#target.can.slice(0, 1));
    this.#others.update(this.#target.can.slice(1));
  }

  #listIn(parent: HTMLElement): KeyedList<Ability> {
    return new KeyedList<Ability>(
      parent,
      ability => ability,
      () => this.#action()
    );
  }

  #action(): ItemView<Ability> {
    let ability: Ability = 'why';
    const node = button('nbguard-link', '', () => {
      this.#act(ability);
    });
    return {
      node,
      update: item => {
        ability = item;
        const panel = this.#panel(ability);
        const pending = isAction(ability) && this.#context.operations.isPending(this.#wanted(ability));
        const words = this.#words(ability);
        setText(node, pending ? this.#context.trans.__('working…') : words);
        setAttribute(node, 'aria-label', `${words} ${cut(this.#target.label)}`);
        setAttribute(node, 'aria-expanded', panel === null ? null : String(panel.isOpen));
        setEnabled(node, !pending);
      }
    };
  }

  #act(ability: Ability): void {
    const panel = this.#panel(ability);
    if (isAction(ability)) {
      this.#context.operations.start(this.#wanted(ability));
    } else if (panel?.isOpen === true) {
      panel.close();
    } else if (panel !== null) {
      this.#ask(panel, ability);
    }
    this.#draw();
  }

  /** Return what answers to an ability that is a question; null: it is an action. */
  #panel(ability: Ability): AnswerPanel | null {
    return ability === 'why' ? this.#why : ability === 'foresee' ? this.#fit : null;
  }

  #ask(panel: AnswerPanel, ability: Ability): void {
    if (this.#target.id === null || !this.#target.can.includes(ability)) {
      panel.close();
    } else {
      panel.open(this.#target.heap, this.#target.id);
    }
  }

  #wanted(action: Action): OperationRequest {
    const { id, label, heap } = this.#target;
    const title = this.#title(action, cut(label));
    if (action === 'clean') {
      return { action: 'clean_stale', title };
    }
    return id === null || action === 'unpark'
      ? { action, title, names: [label] }
      : { action, title, heap, ids: [id] };
  }

  #title(action: Action, label: string): string {
    const { trans } = this.#context;
    switch (action) {
      case 'release':
        return trans.__('Release %1', label);
      case 'park':
        return trans.__('Park %1', label);
      case 'unpark':
        return trans.__('Unpark %1', label);
      case 'clean':
        return trans.__('Clean stale');
    }
  }

  #words(ability: Ability): string {
    const { trans } = this.#context;
    switch (ability) {
      case 'why':
        return trans.__('why');
      case 'foresee':
        return trans.__('next fit');
      case 'release':
        return trans.__('release…');
      case 'park':
        return trans.__('park');
      case 'unpark':
        return trans.__('unpark');
      case 'clean':
        return trans.__('clean…');
    }
  }
}
