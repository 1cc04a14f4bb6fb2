import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { KernelLink } from '../src/link';
import type { HostState } from '../src/view/host';
import type { Channel } from '../src/kernel_sender';
import { evaluated, FakeKernel } from './kernel';

const settle = (milliseconds = 0): Promise<unknown> => vi.advanceTimersByTimeAsync(milliseconds);

let kernel: FakeKernel;
let channel: Channel;
let links: KernelLink[];

function link(): KernelLink {
  const made = new KernelLink(kernel.connect(), () => channel, 'a.ipynb');
  links.push(made);
  return made;
}

const host = (of: KernelLink): HostState => of.get('host') as HostState;
const ops = (): string[] => kernel.told.map(({ data }) => data.op);

beforeEach(() => {
  vi.useFakeTimers();
  kernel = new FakeKernel();
  channel = 'control';
  links = [];
});

afterEach(() => {
  links.forEach(each => {
    each.dispose();
  });
  vi.useRealTimers();
});

describe('a kernel without nbguard', () => {
  it('is asked on the control channel, once, and told nothing', async () => {
    const made = link();
    await settle();
    made.send({ op: 'hello', client: 'view', visible: true });
    await settle(60_000);

    expect(host(made)).toEqual({ kind: 'not_loaded', notebook: 'a.ipynb' });
    expect(kernel.asked).toEqual(['control']);
    expect(kernel.told).toEqual([]);
  });

  it('is asked again after each cell, and greeted in the words of the view when it has it', async () => {
    const made = link();
    made.send({ op: 'hello', client: 'view', visible: true });
    await settle();
    kernel.hasHub = true;
    kernel.endCell();
    await settle();

    expect(host(made)).toEqual({ kind: 'ok' });
    expect(kernel.told).toEqual([{ channel: 'control', data: { op: 'hello', client: 'view', visible: true } }]);
  });

  it('that does not answer is taken to have none when it is idle', async () => {
    kernel.answers = false;
    const made = link();
    await settle();
    kernel.publish('status', { execution_state: 'idle' });
    await settle(2000);
    expect(host(made)).toEqual({ kind: 'ok' });
    await settle(1000);
    expect(host(made).kind).toBe('not_loaded');
  });

  it('that does not answer because it is busy is waited for', async () => {
    kernel.answers = false;
    const made = link();
    await settle();
    kernel.publish('status', { execution_state: 'busy' });
    await settle(10_000);
    expect(host(made)).toEqual({ kind: 'ok' });
  });

  it('loads it, outside of the history and of the last error', async () => {
    const made = link();
    await settle();
    kernel.loading = () => {
      kernel.hasHub = true;
      return evaluated(null);
    };
    await made.load();
    expect(kernel.ran[0]?.content).toMatchObject({ code: '', store_history: false, silent: false });
    expect((kernel.ran[0]?.content as { user_expressions: object }).user_expressions).toHaveProperty('load');
    expect(host(made)).toEqual({ kind: 'ok' });
  });

  it('loads it in every notebook from now on, if that is asked for', async () => {
    const made = link();
    await settle();
    await made.load(true);
    const [once, ever] = [made.load(), made.load(true)];
    await Promise.all([once, ever]);
    const asked = kernel.ran.map(one => (one.content as { user_expressions: { load: string } }).user_expressions.load);
    expect(asked.map(expression => expression.includes('"everywhere": True'))).toEqual([true, false, true]);
  });

  it.each([
    ['its environment has none', evaluated({ kind: 'no_package', python: "/opt/ana's env/%25" }), { kind: 'no_package', python: "/opt/ana's env/%25" }],
    ['it fails', evaluated({ kind: 'failed', error: 'OSError: ü' }), { kind: 'failed', error: 'OSError: ü' }],
    ['nothing answers the panel after it', evaluated(null), { kind: 'not_served' }],
    ['it evaluates nothing', { status: 'ok' }, { kind: 'not_served' }],
    ['a cell before it failed', { status: 'aborted' }, { kind: 'not_run' }]
  ])('says why it cannot be loaded: %s', async (_, reply, problem) => {
    const made = link();
    await settle();
    kernel.loading = () => reply;
    await made.load();
    await settle();
    expect(host(made)).toEqual({ kind: 'not_loaded', notebook: 'a.ipynb', problem });

    kernel.endCell();
    await settle();
    expect(host(made)).toEqual({ kind: 'not_loaded', notebook: 'a.ipynb' });
  });

  it('of another language is said to be one, unless it has nbguard all the same', async () => {
    kernel.language = 'bash';
    const made = link();
    await settle();
    expect(host(made)).toEqual({ kind: 'not_python', notebook: 'a.ipynb', language: 'bash' });
    await made.load();
    expect(host(made).kind).toBe('not_python');

    kernel.hasHub = true;
    kernel.endCell();
    await settle();
    expect(host(made)).toEqual({ kind: 'ok' });
  });

  it('of another language is known while it is busy, by its specification', async () => {
    kernel.specification = 'bash';
    kernel.beginCell();
    const made = link();
    await settle();
    expect(host(made)).toEqual({ kind: 'not_python', notebook: 'a.ipynb', language: 'bash' });
    kernel.endCell(); // it says that it is a Python: a Sage, say
    await settle();
    expect(host(made)).toEqual({ kind: 'not_loaded', notebook: 'a.ipynb' });
  });

  it('says that it waits for a cell of which it has heard only after the click', async () => {
    const made = link();
    await settle();
    kernel.takeCell();
    void made.load();
    await settle();
    expect(host(made)).toMatchObject({ kind: 'loading', waits: false });
    kernel.announceCell();
    expect(host(made)).toEqual({ kind: 'loading', notebook: 'a.ipynb', waits: true });
  });

  it('says that it waits for a cell beside which the kernel has called itself idle', async () => {
    const made = link();
    await settle();
    kernel.beginCell();
    kernel.publish('status', { execution_state: 'idle' }); // after a message on another channel
    void made.load();
    await settle();
    expect(host(made)).toEqual({ kind: 'loading', notebook: 'a.ipynb', waits: true });
  });

  it('loads it when the cell that runs has ended, and says so meanwhile', async () => {
    const made = link();
    await settle();
    kernel.beginCell();
    await settle();
    const loaded = made.load();
    await settle(60_000);
    expect(host(made)).toEqual({ kind: 'loading', notebook: 'a.ipynb', waits: true });
    expect(kernel.ran).toEqual([]);
    kernel.loading = () => {
      kernel.hasHub = true;
      return evaluated(null);
    };
    kernel.endCell();
    await settle();
    await loaded;
    expect(host(made)).toEqual({ kind: 'ok' });
    expect(kernel.ran).toHaveLength(1);
  });
});

describe('a kernel with nbguard', () => {
  beforeEach(() => {
    kernel.hasHub = true;
  });

  it('is heard whoever has said hello', async () => {
    const made = link();
    const seen = vi.fn();
    const started = vi.fn();
    made.on('change:tick', seen);
    made.started.connect(started);
    await settle();
    kernel.tick(1);
    kernel.tick(2);

    expect(made.get('tick')).toMatchObject({ n: 2 });
    expect(seen).toHaveBeenCalledTimes(2);
    expect(started).toHaveBeenCalledTimes(1);
  });

  it('answers the view, which may leave while it is told', async () => {
    const made = link();
    const late = vi.fn();
    made.on('msg:custom', () => {
      made.off('msg:custom', late);
    });
    made.on('msg:custom', late);
    await settle();
    kernel.publish('comm_msg', { comm_id: 'nbguard', data: { op: 'ack', rid: '1' } });
    kernel.publish('comm_msg', { comm_id: 'of a slider', data: { op: 'tick', tick: { n: 7 } } });

    expect(late).not.toHaveBeenCalled();
    expect(made.get('tick')).toEqual({});
  });

  it('gets what the view asks on the channel of the settings', async () => {
    const made = link();
    await settle();
    made.send({ op: 'refresh', rid: '1' });
    channel = 'shell';
    made.send({ op: 'refresh', rid: '2' });

    expect(kernel.told.slice(1)).toEqual([
      { channel: 'control', data: { op: 'refresh', rid: '1' } },
      { channel: 'shell', data: { op: 'refresh', rid: '2' } }
    ]);
  });

  it('is said hello to once per hello', async () => {
    const made = link();
    made.on('change:host', () => {
      made.send({ op: 'hello', client: 'view', visible: true }); // as the view does
    });
    await settle();
    expect(ops()).toEqual(['hello']);
  });

  it('is told that the link itself no longer looks once a view does', async () => {
    const made = link();
    await settle();
    const own = kernel.told[0]?.data as { client?: string } | undefined;
    made.send({ op: 'hello', client: 'view', visible: true });
    made.send({ op: 'hello', client: 'view', visible: true });
    await settle();

    expect(ops()).toEqual(['hello', 'bye', 'hello', 'hello']);
    expect(kernel.told[1]?.data).toEqual({ op: 'bye', client: own?.client });
  });

  it('is looked at by nobody after a bye, also after a restart', async () => {
    const made = link();
    await settle();
    made.send({ op: 'hello', client: 'view', visible: true });
    made.send({ op: 'bye', client: 'view' });
    kernel.publish('status', { execution_state: 'starting' });
    await settle();
    expect(kernel.told.slice(-1)).toMatchObject([{ data: { op: 'hello', visible: false } }]);
  });

  it('has it no longer after a restart, and nothing of before is shown', async () => {
    const made = link();
    await settle();
    kernel.tick(1);
    kernel.hasHub = false;
    kernel.publish('status', { execution_state: 'restarting' });
    expect(host(made)).toEqual({ kind: 'restarting' });
    expect(made.get('tick')).toEqual({});
    kernel.tick(2); // on its way when the kernel was ended
    expect(host(made)).toEqual({ kind: 'restarting' });
    expect(made.get('tick')).toEqual({});
    kernel.publish('status', { execution_state: 'starting' });
    await settle();
    expect(host(made).kind).toBe('not_loaded');
    expect(made.isLive).toBe(false);
  });

  it('is asked after a restart of whose end nothing is heard', async () => {
    const made = link();
    await settle();
    kernel.tick(1);
    kernel.hasHub = false;
    made.noteRestart();
    expect(host(made)).toEqual({ kind: 'restarting' });
    await settle(20_000);
    expect(host(made).kind).toBe('not_loaded');
  });

  it('that dies is dead, and nothing is sent to it', async () => {
    const made = link();
    await settle();
    kernel.tick(1);
    kernel.publish('status', { execution_state: 'dead' });
    await settle();
    expect(host(made)).toEqual({ kind: 'dead' });
    made.send({ op: 'refresh', rid: '1' });
    expect(ops()).toEqual(['hello']);
    await made.load();
    expect(host(made)).toEqual({ kind: 'dead' });
  });

  it('that cannot be reached is said to be disconnected, and asked again when it can', async () => {
    const made = link();
    await settle();
    kernel.tick(1);
    const before = kernel.asked.length;
    kernel.lose();
    await settle();
    expect(host(made)).toEqual({ kind: 'disconnected' });
    expect(made.get('tick')).toMatchObject({ n: 1 });
    made.send({ op: 'refresh', rid: '1' });
    kernel.isReachable = true;
    await settle(60_000);
    expect(host(made)).toEqual({ kind: 'ok' });
    expect(kernel.asked.length).toBe(before + 1);
    expect(ops()).not.toContain('refresh');
  });

  it('that has lost it while it could not be reached is told nothing more', async () => {
    const made = link();
    made.on('change:host', () => {
      made.send({ op: 'hello', client: 'view', visible: true }); // as the view does
    });
    await settle();
    kernel.tick(1);
    kernel.told.length = 0;
    kernel.lose();
    await settle();
    kernel.hasHub = false;
    kernel.isReachable = true;
    await settle(60_000);
    expect(host(made).kind).toBe('not_loaded');
    expect(made.get('tick')).toEqual({});
    expect(kernel.told).toEqual([]);
  });

  it('that says that nothing more comes has it no longer', async () => {
    const made = link();
    await settle();
    kernel.tick(1);
    kernel.hasHub = false;
    kernel.publish('comm_msg', { comm_id: 'nbguard', data: { op: 'closed' } });
    kernel.endCell();
    await settle();

    expect(host(made)).toEqual({ kind: 'not_loaded', notebook: 'a.ipynb' });
    expect(made.get('tick')).toEqual({});
  });

  it('is left when the link is', async () => {
    const made = new KernelLink(kernel.connect(), () => channel, 'a.ipynb');
    await settle();
    expect(kernel.sockets.size).toBe(1);
    made.dispose();
    expect(kernel.sockets.size).toBe(0);
    expect(host(made)).toEqual({ kind: 'ok' });
  });
});
