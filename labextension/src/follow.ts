import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { type ISignal, Signal } from '@lumino/signaling';

import { KernelLink } from './link';
import { NoKernel } from './model';
import type { Model } from './view/protocol';
import type { Channel } from './wire';

/** A link to the kernel of each notebook that has been in front, until no open notebook uses it; and the one in front now. */
export class FrontKernel {
  constructor(tracker: INotebookTracker, channel: () => Channel) {
    this._tracker = tracker;
    this._channel = channel;
    tracker.currentChanged.connect(this._update);
    this._update();
  }

  /** What to show: a `KernelLink`, or that there is no kernel. */
  get current(): Model {
    return this._current;
  }

  /** Emitted when `current` is another one. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Emitted when a kernel sends its first tick. */
  get started(): ISignal<this, void> {
    return this._started;
  }

  private readonly _update = (): void => {
    const front = this._tracker.currentWidget;
    if (front) {
      // Connecting twice is connecting once.
      front.sessionContext.kernelChanged.connect(this._update);
      front.disposed.connect(this._update);
    }
    const current = front ? this._modelOf(front) : NO_NOTEBOOK;
    if (current !== this._current) {
      this._current = current;
      this._changed.emit();
    }
    this._closeUnused();
  };

  private _modelOf(notebook: NotebookPanel): Model {
    const kernel = notebook.sessionContext.session?.kernel;
    if (!kernel || kernel.isDisposed) {
      return NO_NOTEBOOK;
    }
    let link = this._links.get(kernel.id);
    if (!link) {
      link = new KernelLink(kernel, this._channel, notebook.title.label);
      link.started.connect(() => { this._started.emit(); });
      this._links.set(kernel.id, link);
    }
    return link;
  }

  private _closeUnused(): void {
    const used = new Set<string | undefined>();
    this._tracker.forEach(notebook => {
      if (!notebook.isDisposed) {
        used.add(notebook.sessionContext.session?.kernel?.id);
      }
    });
    for (const [id, link] of this._links) {
      if (!used.has(id)) {
        this._links.delete(id);
        link.dispose();
      }
    }
  }

  private readonly _tracker: INotebookTracker;
  private readonly _channel: () => Channel;
  private readonly _links = new Map<string, KernelLink>();
  private readonly _changed = new Signal<this, void>(this);
  private readonly _started = new Signal<this, void>(this);
  private _current: Model = NO_NOTEBOOK;
}

const NO_NOTEBOOK = new NoKernel();
