/** What waits for the kernel: operations of this view, and jobs that other views have asked for. */

import type { ViewContext } from './view_context';
import { button, element, type ItemView, KeyedList, nameElement, setAttribute, setName, setText, show } from './dom';
import type { Operation } from './operations';
import type { JobStatus } from './protocol';

interface Item {
  key: string;
  title: string;
  words: string;
  /** null: it can no longer be given up. */
  cancel: (() => void) | null;
}

export class JobsPanel {
  readonly node = element('ul', 'jobs');
  readonly #list: KeyedList<Item>;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    this.#list = new KeyedList<Item>(
      this.node,
      item => item.key,
      () => this.#row()
    );
    this.node.setAttribute('aria-label', context.trans.__('Waiting'));
  }

  update(): void {
    const { operations, connection } = this.#context;
    const jobs = connection.tick?.jobs ?? [];
    const own = operations.waiting.map(operation => this.#own(operation, jobs.find(job => job.rid === operation.rid)));
    const others = jobs.filter(job => !operations.isOwn(job.rid) && !this.#isQuick(job)).map(job => this.#others(job));
    this.#list.update([...own, ...others]);
    show(this.node, own.length + others.length > 0);
  }

  /** Whether this view asked for it beside an operation (why, refresh) and has it in a moment. */
  #isQuick(job: JobStatus): boolean {
    return job.phase === 'running' && this.#context.connection.isOwn(job.rid);
  }

  #own(operation: Operation, job: JobStatus | undefined): Item {
    const { operations, trans } = this.#context;
    const isRunning = job?.phase === 'running' || operation.phase === 'working';
    return {
      key: operation.rid,
      title: operation.plan?.title ?? operation.wanted.title,
      words: isRunning ? trans.__('working…') : this.#queued(operation.why),
      cancel: isRunning
        ? null
        : () => {
            operations.cancel(operation);
          }
    };
  }

  #others(job: JobStatus): Item {
    const { operations, trans } = this.#context;
    const isRunning = job.phase === 'running';
    return {
      key: job.rid,
      title: job.title,
      words: isRunning ? trans.__('working…') : this.#queued(job.why),
      cancel: isRunning
        ? null
        : () => {
            operations.cancelJob(job.rid);
          }
    };
  }

  #queued(why: string): string {
    return why || this.#context.trans.__('runs when the cell ends');
  }

  #row(): ItemView<Item> {
    let cancel: (() => void) | null = null;
    const title = nameElement('span', 'strong');
    const words = element('span', 'dim wrap');
    const node = button('link', this.#context.trans.__('Cancel'), () => {
      cancel?.();
    });
    return {
      node: element('li', '', element('div', '', title, words), node),
      update: item => {
        cancel = item.cancel;
        setName(title, item.title);
        setText(words, item.words);
        show(node, cancel !== null);
        setAttribute(node, 'aria-label', this.#context.trans.__('Cancel %1', item.title));
      }
    };
  }
}
