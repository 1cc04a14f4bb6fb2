import type { INotebookTracker } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';
import { beforeEach, expect, it, vi } from 'vitest';

import { FrontKernel } from '../src/follow';
import { FakeKernel } from './kernel';

/** A notebook as far as the panel looks at one. */
class Notebook {
  readonly title: { label: string; changed: Signal<object, void> };
  readonly disposed = new Signal<this, void>(this);
  readonly sessionContext: { session: { kernel: Kernel.IKernelConnection | null } | null; kernelChanged: Signal<object, void> };
  isDisposed = false;

  constructor(name: string, kernel: Kernel.IKernelConnection | null) {
    this.title = { label: name, changed: new Signal(this) };
    this.sessionContext = { session: kernel && { kernel }, kernelChanged: new Signal(this) };
  }

  change(kernel: Kernel.IKernelConnection | null): void {
    this.sessionContext.session = { kernel };
    this.sessionContext.kernelChanged.emit();
  }
}

class Tracker {
  readonly currentChanged = new Signal<this, Notebook | null>(this);
  readonly notebooks: Notebook[] = [];
  currentWidget: Notebook | null = null;

  show(notebook: Notebook): void {
    if (!this.notebooks.includes(notebook)) {
      this.notebooks.push(notebook);
    }
    this.currentWidget = notebook;
    this.currentChanged.emit(notebook);
  }

  close(notebook: Notebook): void {
    this.notebooks.splice(this.notebooks.indexOf(notebook), 1);
    if (this.currentWidget === notebook) {
      this.currentWidget = null;
      this.currentChanged.emit(null);
    }
    notebook.isDisposed = true;
    notebook.disposed.emit();
  }

  forEach(act: (notebook: Notebook) => void): void {
    this.notebooks.forEach(act);
  }
}

const settle = (): Promise<void> => new Promise(resolve => setTimeout(resolve));
const noKernel = { kind: 'no_kernel' };

let tracker: Tracker;
let front: FrontKernel;
let a: FakeKernel;
let b: FakeKernel;

beforeEach(() => {
  tracker = new Tracker();
  front = new FrontKernel(tracker as unknown as INotebookTracker, () => 'control');
  a = new FakeKernel();
  b = new FakeKernel();
});

it('shows the kernel of the notebook in front, and keeps what is known of the others', async () => {
  const first = new Notebook('a.ipynb', a.connect('a'));
  const second = new Notebook('b.ipynb', b.connect('b'));
  expect(front.current.get('host')).toEqual(noKernel);

  tracker.show(first);
  await settle();
  a.tick(1);
  expect(front.current.get('tick')).toMatchObject({ n: 1 });

  tracker.show(second);
  await settle();
  expect(front.current.get('host')).toEqual({ kind: 'not_loaded', notebook: 'b.ipynb' });

  a.tick(2);
  tracker.show(first);
  expect(front.current.get('tick')).toMatchObject({ n: 2 });
});

it('goes along when a notebook gets another kernel, or loses it, and leaves the old one', async () => {
  const notebook = new Notebook('a.ipynb', null);
  const changed = vi.fn();
  front.changed.connect(changed);
  tracker.show(notebook);
  expect(front.current.get('host')).toEqual(noKernel);

  notebook.change(a.connect('a'));
  await settle();
  expect(a.sockets.size).toBe(2);
  notebook.change(b.connect('b'));
  await settle();
  expect([a.sockets.size, b.sockets.size]).toEqual([1, 2]);
  notebook.change(null);
  expect(front.current.get('host')).toEqual(noKernel);
  expect(b.sockets.size).toBe(1);
  expect(changed).toHaveBeenCalledTimes(3);
});

it('leaves the kernel of a notebook that is closed, in front or not, unless another one uses it', async () => {
  const first = new Notebook('a.ipynb', a.connect('a'));
  const second = new Notebook('b.ipynb', b.connect('b'));
  const third = new Notebook('on the same.ipynb', b.connect('b'));
  [first, second, third].forEach(each => {
    tracker.show(each);
  });
  await settle();
  tracker.close(first);
  expect(a.sockets.size).toBe(1);
  tracker.close(second);
  expect(b.sockets.size).toBe(3);
  tracker.close(third);
  expect(b.sockets.size).toBe(2);
  expect(front.current.get('host')).toEqual(noKernel);
});

it('tells of the first tick of any kernel', async () => {
  const started = vi.fn();
  front.started.connect(started);
  tracker.show(new Notebook('a.ipynb', a.connect('a')));
  await settle();
  a.tick(1);
  a.tick(2);
  expect(started).toHaveBeenCalledTimes(1);
});
