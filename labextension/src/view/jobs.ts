/** What waits for the kernel: errands of this view, and jobs that other views have asked for. */

import type { Desk } from './desk';
import { button, element, type ItemView, KeyedList, nameElement, setAttribute, setName, setText, show } from './dom';
import type { Errand } from './errands';
import type { Job } from './protocol';

interface Item {
  key: string;
  title: string;
  words: string;
  /** null: it can no longer be given up. */
  cancel: (() => void) | null;
}

export class JobsPanel {
  readonly node = element('ul', 'nbguard-jobs');
  private readonly list: KeyedList<Item>;

  constructor(private readonly desk: Desk) {
    this.list = new KeyedList<Item>(
      this.node,
      item => item.key,
      () => this.row()
    );
    this.node.setAttribute('aria-label', desk.trans.__('Waiting'));
  }

  update(): void {
    const { errands, connection } = this.desk;
    const jobs = connection.tick?.jobs ?? [];
    const own = errands.waiting.map(errand => this.own(errand, jobs.find(job => job.rid === errand.rid)));
    const others = jobs.filter(job => !errands.isOwn(job.rid) && !this.isQuick(job)).map(job => this.others(job));
    this.list.update([...own, ...others]);
    show(this.node, own.length + others.length > 0);
  }

  /** Whether this view asked for it beside an errand (why, refresh) and has it in a moment. */
  private isQuick(job: Job): boolean {
    return job.phase === 'running' && this.desk.connection.isOwn(job.rid);
  }

  private own(errand: Errand, job: Job | undefined): Item {
    const { errands, trans } = this.desk;
    const isRunning = job?.phase === 'running' || errand.phase === 'working';
    return {
      key: errand.rid,
      title: errand.plan?.title ?? errand.wanted.title,
      words: isRunning ? trans.__('working…') : this.queued(errand.why),
      cancel: isRunning
        ? null
        : () => {
            errands.cancel(errand);
          }
    };
  }

  private others(job: Job): Item {
    const { errands, trans } = this.desk;
    const isRunning = job.phase === 'running';
    return {
      key: job.rid,
      title: job.title,
      words: isRunning ? trans.__('working…') : this.queued(job.why),
      cancel: isRunning
        ? null
        : () => {
            errands.cancelJob(job.rid);
          }
    };
  }

  private queued(why: string): string {
    const words = this.desk.trans.__('runs when the cell ends');
    return why === '' || why === words ? words : `${words}: ${why}`;
  }

  private row(): ItemView<Item> {
    let cancel: (() => void) | null = null;
    const title = nameElement('span', 'nbguard-strong');
    const words = element('span', 'nbguard-dim nbguard-wrap');
    const node = button('nbguard-link', this.desk.trans.__('Cancel'), () => {
      cancel?.();
    });
    return {
      node: element('li', '', element('div', '', title, words), node),
      update: item => {
        cancel = item.cancel;
        setName(title, item.title);
        setText(words, item.words);
        show(node, cancel !== null);
        setAttribute(node, 'aria-label', this.desk.trans.__('Cancel %1', item.title));
      }
    };
  }
}
