import type { INotebookTracker } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';
import { beforeEach, describe, expect, it, vi } from 'vitest';

import { FrontKernel } from '../src/follow';
import { KernelLink } from '../src/link';
import { openingOf } from '../src/opening';
import { FakeKernel } from './kernel';

/** A notebook as far as the panel looks at one. */
class Notebook {
  readonly title: { label: string; changed: Signal<object, void> };
  readonly disposed = new Signal<this, void>(this);
  readonly sessionContext: { path: string; session: { kernel: Kernel.IKernelConnection | null } | null; kernelChanged: Signal<object, void>; statusChanged: Signal<object, Kernel.Status> };
  isDisposed = false;

  constructor(name: string, kernel: Kernel.IKernelConnection | null) {
    this.title = { label: name, changed: new Signal(this) };
    this.sessionContext = { path: `work/${name}`, session: kernel && { kernel }, kernelChanged: new Signal(this), statusChanged: new Signal(this) };
    this.sessionContext.statusChanged = new Signal(this.sessionContext);
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

it('goes to a cell by its id, which it keeps when it is run again, and else by its number', () => {
  const cells = [['a', 7], ['b', 3], ['c', null]].map(([id, executionCount]) => ({ model: { id, executionCount } }));
  const content = { widgets: cells, activeCellIndex: -1, deselectAll: vi.fn(), scrollToItem: vi.fn(), activate: vi.fn() };
  const notebook = Object.assign(new Notebook('a.ipynb', a.connect('a')), { content });
  tracker.show(notebook);

  expect(front.goToCell(1, 'a')).toBe(true);
  expect(content.activeCellIndex).toBe(0);
  expect(front.goToCell(3, 'not there')).toBe(true);
  expect(content.activeCellIndex).toBe(1);
  expect(front.goToCell(7)).toBe(true);
  expect(content.activeCellIndex).toBe(0);
  expect(front.goToCell(1, '')).toBe(false);
});

describe('a notebook that the page is opening', () => {
  const own = (kernel: FakeKernel, id: string): KernelLink =>
    new KernelLink(kernel.connect(id), () => 'control', 'a.ipynb');

  it('is shown before it is there, and by the same link when it is', async () => {
    const started = vi.fn();
    front.started.connect(started);
    const link = own(a, 'a');
    await settle();
    a.tick(1);
    front.expect({ path: 'work/a.ipynb', link });
    expect(front.current.get('tick')).toMatchObject({ n: 1 });
    expect(started).toHaveBeenCalledTimes(1);

    const notebook = new Notebook('a.ipynb', null);
    tracker.show(notebook);
    expect(front.current).toBe(link);
    notebook.change(a.connect('a'));
    front.stopExpecting();
    expect(front.current).toBe(link);
    expect(a.sockets.size).toBe(2);
  });

  it('is left for another notebook in front, for another kernel, and when it does not come', async () => {
    const link = own(a, 'a');
    front.expect({ path: 'work/a.ipynb', link });
    tracker.show(new Notebook('b.ipynb', b.connect('b')));
    await settle();
    expect(front.current.get('host')).toMatchObject({ notebook: 'b.ipynb' });
    expect(link.isDisposed).toBe(true);

    const other = own(a, 'a');
    front.expect({ path: 'work/b.ipynb', link: other });
    expect(front.current).not.toBe(other);
    expect(other.isDisposed).toBe(true);
  });

  it('is left when nothing of it has come', () => {
    const link = own(a, 'a');
    front.expect({ path: 'work/a.ipynb', link });
    front.stopExpecting();
    expect(front.current.get('host')).toEqual(noKernel);
    expect(link.isDisposed).toBe(true);
  });

  it('is no longer waited for when the notebook is faster', () => {
    tracker.show(new Notebook('a.ipynb', a.connect('a')));
    const shown = front.current;
    const late = own(a, 'a');
    front.expect({ path: 'work/a.ipynb', link: late });
    expect(front.current).toBe(shown);
    expect(late.isDisposed).toBe(true);
  });

  it('is the one that the address names, of those with a kernel', async () => {
    const session = (path: string, id: string | null): object => ({ path, kernel: id && { id, name: 'python3' } });
    const running = [session('c.ipynb', 'c'), session('plans/ä b.ipynb', 'a'), session('d.ipynb', null)];
    const services = {
      sessions: { ready: Promise.resolve(), running: () => running },
      kernels: { connectTo: ({ model }: { model: { id: string } }) => a.connect(model.id) }
    } as unknown as Parameters<typeof openingOf>[0];
    const of = async (address: string): Promise<string | undefined> =>
      (await openingOf(services, address, () => 'control'))?.link.kernel;

    expect(await of('/hub/ana/lab/tree/plans/%C3%A4%20b.ipynb')).toBe('a');
    expect(await of('/notebooks/plans/%C3%A4%20b.ipynb')).toBe('a');
    expect(await of('/lab/workspaces/auto-1/tree/c.ipynb')).toBe('c');
    expect(await of('/lab/tree/b.ipynb')).toBeUndefined();
    expect(await of('/lab/tree/d.ipynb')).toBeUndefined();
    expect(await of('/lab')).toBeUndefined();
  });
});

it('knows of a restart from the notebook, where the kernel itself does not say so', async () => {
  const notebook = new Notebook('a.ipynb', a.connect('a'));
  tracker.show(notebook);
  a.hasHub = true;
  await settle();
  a.tick(1);
  notebook.sessionContext.statusChanged.emit('restarting');
  expect(front.current.get('host')).toEqual({ kind: 'restarting' });
  expect([front.current.get('tick'), front.current.get('heap')]).toEqual([{}, {}]);
  a.hasHub = false;
  notebook.sessionContext.statusChanged.emit('idle');
  await settle();
  expect(front.current.get('host')).toEqual({ kind: 'not_loaded', notebook: 'a.ipynb' });
});
