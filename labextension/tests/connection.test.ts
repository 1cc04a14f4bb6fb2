import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Connection, type Change, type Progress } from '../src/view/connection';
import { PROTOCOL, isAnswer, isMemoryState, isTick, type Answer } from '../src/view/protocol';
import { FakeModel, outcome, plan, scene, why } from './model';

let model: FakeModel;
let connection: Connection;
let changes: Change[];

function open(state = scene('idle')): void {
  model = new FakeModel(state);
  changes = [];
  connection = new Connection(model, what => changes.push(what));
  connection.open();
}

function ask(): Progress['op'][] {
  const heard: Progress['op'][] = [];
  connection.ask({ op: 'plan', action: 'clean_stale' }, ({ op }) => heard.push(op));
  return heard;
}

beforeEach(() => {
  vi.useFakeTimers();
  open();
});

afterEach(() => {
  connection.close();
  vi.useRealTimers();
});

describe('hello', () => {
  it('is said at once, every 5 s, and when the view is shown or hidden', () => {
    expect(model.all('hello')).toHaveLength(1);
    vi.advanceTimersByTime(10_000);
    expect(model.all('hello')).toHaveLength(3);
    connection.setVisible(false);
    expect(model.last('hello')).toMatchObject({ visible: false });
    connection.setVisible(false);
    expect(model.all('hello')).toHaveLength(4);
  });

  it('names the heap that the view has, so that it is not sent again', () => {
    const { boot, heap } = scene('idle').heap;
    expect(model.last('hello')).toMatchObject({ boot, heap });
    model.set({ heap: {} });
    vi.advanceTimersByTime(5000);
    expect(Object.keys(model.last('hello'))).toEqual(['op', 'client', 'visible']);
  });

  it('is said to the kernel that is there after a restart', () => {
    model.set({ host: { kind: 'restarting' } });
    model.set({ host: { kind: 'ok' } });
    expect(model.all('hello')).toHaveLength(3);
  });

  it('pauses with bye while the view rests, which hears all the same what it has asked for', () => {
    const heard = ask();
    connection.rest();
    const sent = model.sent.length;
    expect(model.last('bye')).toMatchObject({ client: (model.last('hello') as { client: string }).client });
    model.set({ host: { kind: 'ok' } });
    vi.advanceTimersByTime(500);
    model.say('plan', { op: 'ack' });
    vi.advanceTimersByTime(60_000);
    expect(model.sent).toHaveLength(sent);
    expect(heard).toEqual(['ack']);
    connection.open();
    expect(model.sent.slice(sent)).toMatchObject([{ op: 'hello' }]);
    expect(connection.silent).toBe(false);
  });

  it('ends with bye, after which nothing is left', () => {
    ask();
    connection.close();
    const sent = model.sent.length;
    expect(model.last('bye')).toMatchObject({ client: (model.last('hello') as { client: string }).client });
    expect(model.listening).toBe(0);
    vi.advanceTimersByTime(60_000);
    expect(model.sent).toHaveLength(sent);
    expect(vi.getTimerCount()).toBe(0);
  });
});

describe('a request', () => {
  it('is late without an ack within a second, and not with one', () => {
    const heard = ask();
    vi.advanceTimersByTime(999);
    expect(heard).toEqual([]);
    vi.advanceTimersByTime(1);
    expect(heard).toEqual(['late']);

    const acknowledged = ask();
    model.say('plan', { op: 'ack' });
    vi.advanceTimersByTime(5000);
    expect(acknowledged).toEqual(['ack']);
  });

  it('has rids of its own, and hears its own answers only', () => {
    const first = ask();
    const second = ask();
    const rids = model.all('plan').map(request => (request as { rid: string }).rid);
    expect(new Set(rids).size).toBe(2);
    model.say('plan', { op: 'refused', why: 'no' });
    model.say('plan', { op: 'refused', why: 'again' });
    expect(first).toEqual([]);
    expect(second).toEqual(['refused']);
  });

  it('is lost when another kernel ticks, or the kernel dies; not while the connection is away', () => {
    const restarted = ask();
    model.set({ tick: { ...scene('idle').tick, boot: 'another' } });
    expect(restarted).toEqual(['lost']);
    expect(connection.heap).toBeNull();

    const heard = ask();
    model.set({ host: { kind: 'disconnected' } });
    expect(heard).toEqual([]);
    model.set({ host: { kind: 'dead' } });
    expect(heard).toEqual(['lost']);
  });
});

describe('a silent kernel', () => {
  it('is one that has not ticked for more than 2 s; it recovers by itself', () => {
    vi.advanceTimersByTime(2000);
    expect(connection.silent).toBe(false);
    vi.advanceTimersByTime(1000);
    expect(connection.silent).toBe(true);
    model.set({ tick: scene('idle').tick });
    expect(connection.silent).toBe(false);
    expect(changes.slice(-2)).toEqual(['tick', 'silent']);
  });

  it('is not spoken of while nobody looks, nor at once when somebody does again', () => {
    connection.setVisible(false);
    vi.advanceTimersByTime(60_000);
    connection.setVisible(true);
    vi.advanceTimersByTime(1500);
    expect(changes).not.toContain('silent');
  });
});

describe('what is told', () => {
  it('takes a heap that it has already for no change', () => {
    changes.length = 0;
    model.set({ heap: scene('idle').heap });
    expect(changes).toEqual([]);
    model.set({ heap: { ...scene('idle').heap, heap: 8 } });
    expect(changes).toEqual(['heap']);
  });

  it('reads nothing of another version of the protocol', () => {
    model.set({ tick: { ...scene('idle').tick, v: PROTOCOL + 1 } });
    expect(connection.tick).toBeNull();
    expect(connection.foreign).toBe(true);
  });

  it('has nothing before the first data', () => {
    connection.close();
    open({ tick: {}, heap: {} } as never);
    expect(connection.tick).toBeNull();
    expect(connection.heap).toBeNull();
    expect(connection.foreign).toBe(false);
  });
});

/** Every way to spoil a value at one place: a field gone, or of another type. */
function* mutants(value: unknown): Generator {
  if (Array.isArray(value)) {
    const items: unknown[] = value;
    for (let i = 0; i < items.length; i++) {
      for (const mutant of mutants(items[i])) {
        yield [...items.slice(0, i), mutant, ...items.slice(i + 1)];
      }
    }
  } else if (typeof value === 'object' && value !== null) {
    for (const [name, field] of Object.entries(value)) {
      yield Object.fromEntries(Object.entries(value).filter(([other]) => other !== name));
      for (const mutant of mutants(field)) {
        yield { ...value, [name]: mutant };
      }
    }
  }
  yield typeof value === 'object' && value !== null ? 7 : { not: 'this' };
  yield typeof value === 'boolean' ? 'true' : true;
}

describe('a malformed message', () => {
  let warned: string[];

  beforeEach(() => {
    warned = [];
    vi.spyOn(console, 'warn').mockImplementation(text => warned.push(String(text)));
  });

  afterEach(() => {
    vi.restoreAllMocks();
  });

  it.each(['hostile', 'idle', 'many', 'oom', 'parked', 'stale', 'training'] as const)('is not what a kernel sends: %s', name => {
    const { tick, heap, history } = scene(name);
    expect(isTick(tick)).toBe(true);
    expect(isMemoryState(heap)).toBe(true);
    expect(isAnswer({ op: 'history', rid: 'r', history })).toBe(true);
  });

  it('is recognised wherever it is spoilt', () => {
    const { tick, heap, history } = scene('training');
    const lines = history.lines.map(({ device, points }) => ({ device, points: points.slice(0, 2) }));
    const ofTick = [...mutants(tick)];
    const ofHeap = [...mutants({ ...scene('oom').heap, holders: heap.holders.slice(0, 2) })];
    const answers: Answer[] = [
      { op: 'ack', rid: 'r' },
      { op: 'queued', rid: 'r', why: 'a cell' },
      { op: 'history', rid: 'r', history: { ...history, lines } },
      { op: 'why', rid: 'r', why },
      { op: 'plan', rid: 'r', plan },
      { op: 'done', rid: 'r', outcome },
      { op: 'refused', rid: 'r', why: 'no' }
    ];
    const ofAnswers = answers.flatMap(answer => [...mutants(answer)]);
    expect(ofTick.length).toBeGreaterThan(150);
    expect(ofHeap.length).toBeGreaterThan(150);
    expect(answers.every(isAnswer)).toBe(true);
    expect(ofTick.filter(isTick)).toEqual([]);
    expect(ofHeap.filter(isMemoryState)).toEqual([]);
    expect(ofAnswers.filter(isAnswer)).toEqual([]);
  });

  it('is one of an unknown kind, of numbers that are none, of a word that is none', () => {
    const { tick } = scene('idle');
    expect(isAnswer({ op: 'constructor', rid: 'r' })).toBe(false);
    expect(isTick({ ...tick, t: NaN })).toBe(false);
    expect(isTick({ ...tick, jobs: [{ rid: 'r', title: 'Clean', phase: 'done', why: '' }] })).toBe(false);
    expect(isTick({ ...tick, later: 'a field of a newer kernel' })).toBe(true);
  });

  it('is dropped with one warning, and the view goes on', () => {
    const { tick, heap } = scene('idle');
    const before = connection.tick;
    const heard = ask();
    changes.length = 0;
    for (const spoilt of [{ ...tick, devices: 'all' }, { ...tick, n: null }, 5, null]) {
      model.set({ tick: spoilt as never });
    }
    model.set({ heap: { ...heap, heap: 8, holders: [null] } });
    model.say('plan', { op: 'plan', plan: { ...plan, rows: 'none' } as never });
    expect(connection.tick).toBe(before);
    expect(connection.heap?.heap).toBe(heap.heap);
    expect(changes).toEqual([]);
    expect(heard).toEqual([]);
    expect(warned).toHaveLength(3);

    model.set({ tick: { ...tick, n: tick.n + 1 } });
    model.set({ heap: { ...heap, heap: 9 } });
    model.say('plan', { op: 'plan', plan });
    expect(connection.tick?.n).toBe(tick.n + 1);
    expect(connection.heap?.heap).toBe(9);
    expect(heard).toEqual(['plan']);
    expect(warned).toHaveLength(3);
  });

  it('is silence, if nothing better follows', () => {
    for (let i = 0; i < 6; i++) {
      model.set({ tick: { ...scene('idle').tick, devices: null } });
      vi.advanceTimersByTime(500);
    }
    expect(connection.silent).toBe(true);
  });
});
