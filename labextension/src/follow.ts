import type { ISessionContext } from '@jupyterlab/apputils';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel, Session } from '@jupyterlab/services';
import { type ISignal, Signal } from '@lumino/signaling';

import { KernelLink } from './link';
import { NoKernel } from './observable_model';
import type { Opening } from './opening';
import type { Model } from './view/host';
import type { Channel } from './kernel_sender';

/** The sessions of the server, as its manager has them. */
type SessionList = Pick<Session.IManager, 'running'>;

/** A link to the kernel of each notebook that has been in front, until no open notebook uses it; and the one in front now. */
export class FrontKernel {
  /** `sessions` are those of the server: of notebooks in other tabs and browsers, too. */
  constructor(tracker: INotebookTracker, channel: () => Channel, sessions: SessionList | null = null) {
    this.#tracker = tracker;
    this.#sessions = sessions;
    this.#channel = channel;
    tracker.currentChanged.connect(this.#update);
    this.#update();
  }

  /** What to show: a `KernelLink`, or that there is no kernel. */
  get current(): Model {
    return this.#model;
  }

  /** The link to the kernel with this id, if a notebook in this page has one. */
  linkTo(kernel: string): KernelLink | undefined {
    return this.#links.get(kernel);
  }

  /** Emitted when `current` is another one. */
  get changed(): ISignal<this, void> {
    return this.#changedSignal;
  }

  /** Emitted when a kernel sends its first tick. */
  get started(): ISignal<this, void> {
    return this.#startedSignal;
  }

  /** Show the kernel of a notebook that the page is opening, until another one is in front, or it has another kernel. */
  expect(opening: Opening): void {
    const { link } = opening;
    if (this.#links.has(link.kernel)) {
      link.dispose(); // the notebook was faster
      return;
    }
    this.#opening = opening;
    this.#add(link);
    if (link.isLive) {
      this.#startedSignal.emit();
    }
    this.#update();
  }

  /** Show it no longer: the page has opened what it had to open. */
  stopExpecting(): void {
    this.#opening = null;
    this.#update();
  }

  /** Name of the notebook of the kernel with this id, as far as the server tells; null: of none. */
  nameOf(kernel: string): string | null {
    for (const session of this.#sessions?.running() ?? []) {
      if (session.kernel?.id === kernel) {
        return session.path.split('/').pop() ?? null;
      }
    }
    return null;
  }

  /**
   * Show a cell in the notebook in front: the one with this id, which it keeps when it is run again, else the one with this
   * number. False: it is no longer there.
   */
  goToCell(number: number, id = ''): boolean {
    const notebook = this.#tracker.currentWidget?.content;
    const cells = notebook?.widgets ?? [];
    const byId = cells.findIndex(({ model }) => model.id === id);
    const byNumber = cells.findIndex(({ model }) => 'executionCount' in model && model.executionCount === number);
    const index = byId < 0 ? byNumber : byId;
    if (notebook === undefined || index < 0) {
      return false;
    }
    notebook.deselectAll();
    notebook.activeCellIndex = index;
    void notebook.scrollToItem(index, 'smart');
    notebook.activate();
    return true;
  }

  readonly #update = (): void => {
    const front = this.#tracker.currentWidget;
    if (front) {
      // Connecting twice is connecting once.
      front.sessionContext.kernelChanged.connect(this.#update);
      front.sessionContext.statusChanged.connect(this.#onStatus);
      front.disposed.connect(this.#update);
      front.title.changed.connect(this.#rename);
    }
    const model = front && this.#modelOf(front);
    if (front && (model || front.sessionContext.path !== this.#opening?.path)) {
      this.#opening = null;
    }
    const current = model ?? this.#opening?.link ?? NO_NOTEBOOK;
    if (current !== this.#model) {
      this.#model = current;
      this.#changedSignal.emit();
    }
    this.#closeUnused();
  };

  /** Tell the link of a restart that a notebook's own connection knows of. */
  readonly #onStatus = (context: ISessionContext, status: Kernel.Status): void => {
    const link = this.#links.get(context.session?.kernel?.id ?? '');
    if (status === 'restarting' || status === 'autorestarting') {
      link?.noteRestart();
    } else if (status === 'starting' || status === 'idle') {
      link?.noteStart();
    }
  };

  /** Call each kernel by the name that its notebook has now. */
  readonly #rename = (): void => {
    this.#tracker.forEach(notebook => {
      if (!notebook.isDisposed) {
        this.#links.get(notebook.sessionContext.session?.kernel?.id ?? '')?.rename(notebook.title.label);
      }
    });
  };

  /** The link to a notebook's kernel; null: it has none, or none yet. */
  #modelOf(notebook: NotebookPanel): Model | null {
    const kernel = notebook.sessionContext.session?.kernel;
    if (!kernel || kernel.isDisposed) {
      return null;
    }
    return (
      this.#links.get(kernel.id) ??
      this.#add(new KernelLink(kernel.clone({ handleComms: false }), this.#channel, notebook.title.label))
    );
  }

  #add(link: KernelLink): KernelLink {
    link.started.connect(() => { this.#startedSignal.emit(); });
    this.#links.set(link.kernel, link);
    return link;
  }

  #closeUnused(): void {
    const used = new Set<string | undefined>([this.#opening?.link.kernel]);
    this.#tracker.forEach(notebook => {
      if (!notebook.isDisposed) {
        used.add(notebook.sessionContext.session?.kernel?.id);
      }
    });
    for (const [id, link] of this.#links) {
      if (!used.has(id)) {
        this.#links.delete(id);
        link.dispose();
      }
    }
  }

  readonly #tracker: INotebookTracker;
  readonly #sessions: SessionList | null;
  readonly #channel: () => Channel;
  readonly #links = new Map<string, KernelLink>();
  readonly #changedSignal = new Signal<this, void>(this);
  readonly #startedSignal = new Signal<this, void>(this);
  #model: Model = NO_NOTEBOOK;
  #opening: Opening | null = null;
}

const NO_NOTEBOOK = new NoKernel();
