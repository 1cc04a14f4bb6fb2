/** What can be done with one row: why, release…, park, unpark. */

import type { ViewContext } from './view_context';
import { button, cut, element, type ItemView, KeyedList, setAttribute, setEnabled, setText } from './dom';
import type { OperationRequest } from './operations';
import type { Ability } from './protocol';
import { WhyPanel } from './why';

/** A row of a heap. `id` is null for what is parked: that goes by its label. */
export interface Target {
  id: number | null;
  label: string;
  heap: number;
  can: readonly Ability[];
}

export class RowActions {
  readonly node = element('span', 'nbguard-row-actions');
  readonly why: WhyPanel;
  #target: Target = { id: null, label: '', heap: -1, can: [] };
  readonly #first: KeyedList<Ability>;
  readonly #others: KeyedList<Ability>;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.why = new WhyPanel(context);
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
    setAttribute(this.why.node, 'aria-label', `${this.#context.trans.__('why')} ${cut(target.label)}`);
    if (isNew && this.why.isOpen) {
      this.#ask();
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
        const pending = ability !== 'why' && this.#context.operations.isPending(this.#wanted(ability));
        const words = this.#words(ability);
        setText(node, pending ? this.#context.trans.__('working…') : words);
        setAttribute(node, 'aria-label', `${words} ${cut(this.#target.label)}`);
        setAttribute(node, 'aria-expanded', ability === 'why' ? String(this.why.isOpen) : null);
        setEnabled(node, !pending);
      }
    };
  }

  #act(ability: Ability): void {
    if (ability !== 'why') {
      this.#context.operations.start(this.#wanted(ability));
    } else if (this.why.isOpen) {
      this.why.close();
    } else {
      this.#ask();
    }
    this.#draw();
  }

  #ask(): void {
    if (this.#target.id === null || !this.#target.can.includes('why')) {
      this.why.close();
    } else {
      this.why.open(this.#target.heap, this.#target.id);
    }
  }

  #wanted(action: Exclude<Ability, 'why'>): OperationRequest {
    const { id, label, heap } = this.#target;
    const title = this.#title(action, cut(label));
    if (action === 'clean') {
      return { action: 'clean_stale', title };
    }
    return id === null || action === 'unpark'
      ? { action, title, names: [label] }
      : { action, title, heap, ids: [id] };
  }

  #title(action: Exclude<Ability, 'why'>, label: string): string {
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
