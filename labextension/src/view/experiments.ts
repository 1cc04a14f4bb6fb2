/** Learners: what each is, what it takes, whether it trains, is parked, or is only still there. */

import { formatColumn } from './bytes';
import type { ViewContext } from './view_context';
import { element, type ItemView, KeyedList, nameElement, setAttribute, setName, setText, show } from './dom';
import type { Experiment, FitTick, MemoryState } from './protocol';
import { RowActions } from './row_actions';
import { cell, join } from './words';

interface Item {
  experiment: Experiment;
  state: Experiment['state'];
  figure: string;
  heap: number;
}

export class ExperimentsSection {
  readonly node = element('section', 'nbguard-section');
  private readonly list: KeyedList<Item>;
  private heap: MemoryState | null = null;
  /** Name of the Learner that a fit runs on; null: none does. */
  private training: string | null = null;

  constructor(context: ViewContext) {
    const rows = element('ul', 'nbguard-rows');
    this.list = new KeyedList<Item>(
      rows,
      ({ experiment }) => `${experiment.label}\n${String(experiment.cell)}`,
      () => new ExperimentView(context)
    );
    this.node.append(element('h3', 'nbguard-title', context.trans.__('Experiments')), rows);
  }

  update(heap: MemoryState | null): void {
    this.heap = heap;
    this.draw();
  }

  /** Take what a tick knows sooner than a heap: which Learner trains. */
  follow(fit: FitTick | null): void {
    const training = fit?.label ?? null;
    if (training !== this.training) {
      this.training = training;
      this.draw();
    }
  }

  private draw(): void {
    const { heap } = this;
    const experiments = heap?.experiments ?? [];
    show(this.node, experiments.length > 0);
    const figures = formatColumn(experiments.map(experiment => experiment.nbytes));
    this.list.update(
      experiments.map((experiment, i) => ({
        experiment,
        state: this.stateOf(experiment),
        figure: figures[i] ?? '',
        heap: heap?.heap ?? -1
      }))
    );
  }

  private stateOf({ label, state }: Experiment): Experiment['state'] {
    if (state === 'training' && this.training === null) {
      return 'live';
    }
    return state === 'live' && label === this.training ? 'training' : state;
  }
}

class ExperimentView implements ItemView<Item> {
  readonly node = element('li', 'nbguard-row');
  private readonly name = nameElement('span', 'nbguard-code');
  private readonly figure = element('span', 'nbguard-figure');
  private readonly summary = nameElement('div', 'nbguard-dim nbguard-wrap');
  private readonly note = nameElement('div', 'nbguard-dim nbguard-wrap');
  private readonly chip = element('span');
  private readonly actions: RowActions;

  constructor(private readonly context: ViewContext) {
    this.actions = new RowActions(context);
    this.node.append(
      element('div', 'nbguard-row-head', this.name, this.chip, this.figure),
      element('div', 'nbguard-row-words', element('div', 'nbguard-grow', this.summary, this.note), this.actions.node),
      this.actions.why.node
    );
  }

  update({ experiment, state, figure, heap }: Item): void {
    const { trans } = this.context;
    setName(this.name, experiment.label);
    setText(this.figure, figure);
    const where = experiment.cell === null ? '' : cell(experiment.cell);
    setName(this.summary, join([experiment.summary, where]));
    show(this.summary, this.summary.textContent !== '');
    setName(this.note, experiment.note);
    show(this.note, experiment.note !== '');
    setText(this.chip, trans.__(state));
    setAttribute(this.chip, 'class', `nbguard-chip nbguard-${state}`);
    show(this.chip, state !== 'live');
    this.actions.update({ ...experiment, heap });
    show(this.actions.node, experiment.can.length > 0);
  }
}
