/** What can be done with one row: why, release…, park, unpark, next fit. */

import type { ViewContext } from './view_context';
import { button, cut, element, type ItemView, KeyedList, setAttribute, setEnabled, setText } from './dom';
import type { OperationRequest } from './operations';
import type { Ability } from './protocol';
import { AnswerPanel, type Topic } from './answer_panel';

/** A row of a heap. `id` is null for what is parked: that goes by its label. */
export interface Target {
  id: number | null;
  label: string;
  heap: number;
  can: readonly Ability[];
}

type Action = Exclude<Ability, Topic>;

function isTopic(ability: Ability): ability is Topic {
  return ability === 'why' || ability === 'predict';
}

export class RowActions {
  readonly node = element('span', 'row-actions');
  readonly answer: AnswerPanel;
  #target: Target = { id: null, label: '', heap: -1, can: [] };
  readonly #list: KeyedList<Ability>;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.answer = new AnswerPanel(context);
    const actions = element('span', 'links');
    this.#list = new KeyedList<Ability>(
      actions,
      ability => ability,
      () => this.#action()
    );
    this.node.append(actions);
  }

  update(target: Target): void {
    const isNew = target.heap !== this.#target.heap;
    this.#target = target;
    this.#draw();
    setAttribute(this.answer.node, 'aria-label', cut(target.label));
    if (isNew && this.answer.topic === 'why' && target.can.includes('why')) {
      this.#ask('why');
    } else if (isNew) {
      this.answer.close(); // what was predicted of the former heap is gone: that takes another click
    }
  }

  #draw(): void {
    this.#list.update(this.#target.can);
  }

  #action(): ItemView<Ability> {
    let ability: Ability = 'why';
    const node = button('link', '', () => {
      this.#act(ability);
    });
    return {
      node,
      update: item => {
        ability = item;
        const pending = !isTopic(ability) && this.#context.operations.isPending(this.#wanted(ability));
        const words = this.#words(ability);
        node.dataset.kind = ability;
        setText(node, pending ? this.#context.trans.__('working…') : words);
        setAttribute(node, 'aria-label', `${words} ${cut(this.#target.label)}`);
        setAttribute(node, 'aria-expanded', isTopic(ability) ? String(this.answer.topic === ability) : null);
        setEnabled(node, !pending);
      }
    };
  }

  #act(ability: Ability): void {
    if (!isTopic(ability)) {
      this.#context.operations.start(this.#wanted(ability));
    } else if (this.answer.topic === ability) {
      this.answer.close();
    } else {
      this.#ask(ability);
    }
    this.#draw();
  }

  #ask(topic: Topic): void {
    this.answer.open(topic, this.#target.heap, this.#target.id ?? -1);
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
      case 'predict':
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
