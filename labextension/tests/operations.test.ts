import { beforeEach, describe, expect, it } from 'vitest';

import type { Progress, Question } from '../src/view/connection';
import { Operations, type Operation } from '../src/view/operations';
import { outcome, plan } from './model';

/** A port to a kernel: what was asked, and a way to answer it. */
class RequestPort {
  readonly asked: Question[] = [];
  readonly cancelled: string[] = [];
  private readonly heard: ((progress: Progress) => void)[] = [];

  ask(question: Question, heard: (progress: Progress) => void): string {
    this.asked.push(question);
    return `rid-${String(this.heard.push(heard) - 1)}`;
  }

  cancel(rid: string): void {
    this.cancelled.push(rid);
  }

  say(progress: object, to = this.heard.length - 1): void {
    this.heard[to]?.({ rid: `rid-${String(to)}`, ...progress } as Progress);
  }
}

let port: RequestPort;
let operations: Operations;

beforeEach(() => {
  port = new RequestPort();
  operations = new Operations(port, () => undefined, 'The kernel was restarted.');
});

/** The operation whose plan is shown. */
function shown(): Operation {
  operations.start({ action: 'clean_stale', title: 'Clean stale' });
  port.say({ op: 'plan', plan });
  return the(operations.open);
}

function waiting(): Operation {
  return the(operations.waiting[0]);
}

function the(operation: Operation | null | undefined): Operation {
  if (!operation) {
    throw new Error('there is no such operation');
  }
  return operation;
}

describe('an operation', () => {
  it('is planned, agreed to by its token, and done', () => {
    const operation = shown();
    operations.confirm(operation);
    expect(port.asked).toEqual([
      { op: 'plan', action: 'clean_stale' },
      { op: 'apply', token: 'token-1' }
    ]);
    port.say({ op: 'done', outcome });
    expect(operations.open).toBeNull();
    expect(operations.result).toEqual({ kind: 'done', outcome });
  });

  it('is planned anew without the steps that are left out; only the last plan counts', () => {
    const operation = shown();
    operations.toggle(operation, 'Out[9]', true);
    operations.confirm(operation);
    expect(port.asked).toHaveLength(2);
    operations.toggle(operation, 'last error', true);
    expect(port.asked[2]).toEqual({ op: 'plan', action: 'clean_stale', keep: ['last error', 'Out[9]'] });
    port.say({ op: 'plan', plan: { ...plan, token: 'old' } }, 1);
    expect(operation.plan?.token).toBe('');
    port.say({ op: 'plan', plan: { ...plan, token: 'new' } });
    expect(operation.plan?.token).toBe('new');
  });

  it('is asked about again if the plan would do something else by now', () => {
    const operation = shown();
    operations.confirm(operation);
    port.say({ op: 'plan', plan: { ...plan, token: 'token-2' } });
    expect(operations.open).toBe(operation);
    expect(operation.isRevised).toBe(true);
    operations.confirm(operation);
    expect(port.asked[2]).toEqual({ op: 'apply', token: 'token-2' });
  });

  it('is under way once, and gives the table to the next', () => {
    operations.start({ action: 'clean_stale', title: 'Clean stale' });
    operations.start({ action: 'clean_stale', title: 'Clean stale' });
    expect(port.asked).toHaveLength(1);
    port.say({ op: 'plan', plan });
    operations.start({ action: 'release', title: 'Release a', heap: 7, ids: [2] });
    expect(operations.open).toBeNull();
    expect(port.asked[1]).toEqual({ op: 'plan', action: 'release', heap: 7, ids: [2] });
    expect(operations.isPending({ action: 'release', title: '', heap: 7, ids: [2] })).toBe(true);
    expect(operations.isPending({ action: 'release', title: '', heap: 7, ids: [3] })).toBe(false);
  });
});

describe('what waits', () => {
  it('says that it runs when the cell ends: late, or queued with what for', () => {
    const operation = shown();
    operations.confirm(operation);
    port.say({ op: 'late' });
    expect(operations.open).toBeNull();
    expect(operations.waiting).toEqual([operation]);
    port.say({ op: 'queued', why: 'In[14] uses it' });
    expect(operation).toMatchObject({ phase: 'queued', why: 'In[14] uses it' });
    port.say({ op: 'done', outcome });
    expect(operations.waiting).toEqual([]);
  });

  it('works once a late ack is there', () => {
    operations.start({ action: 'empty_cache', title: 'Empty cache' });
    port.say({ op: 'late' });
    port.say({ op: 'ack' });
    expect(waiting().phase).toBe('working');
  });

  it('can be given up; what was done all the same is told, a refusal is not', () => {
    operations.confirm(shown());
    port.say({ op: 'queued', why: 'busy' });
    operations.cancel(waiting());
    expect(port.cancelled).toEqual(['rid-1']);
    expect(operations.waiting).toEqual([]);
    port.say({ op: 'done', outcome });
    expect(operations.result).toEqual({ kind: 'done', outcome });

    operations.dismiss();
    operations.start({ action: 'empty_cache', title: 'Empty cache' });
    port.say({ op: 'late' });
    operations.cancel(waiting());
    port.say({ op: 'refused', why: 'cancelled' });
    expect(operations.result).toBeNull();
  });

  it('is off the list when another view has cancelled it', () => {
    operations.confirm(shown());
    port.say({ op: 'queued', why: 'busy' });
    operations.reconcile([]);
    expect(operations.waiting).toHaveLength(1);
    operations.reconcile([{ rid: 'rid-1', title: 'Clean stale', phase: 'queued', why: 'busy' }]);
    expect(operations.waiting).toHaveLength(1);
    operations.reconcile([]);
    expect(operations.waiting).toEqual([]);
  });
});

it('says in words what was refused, and that the kernel is gone', () => {
  operations.start({ action: 'release', title: 'Release learn', heap: 7, ids: [0] });
  port.say({ op: 'refused', why: 'it trains' });
  expect(operations.result).toEqual({ kind: 'refused', title: 'Release learn', why: 'it trains' });
  operations.confirm(shown());
  port.say({ op: 'lost' });
  expect(operations.result).toMatchObject({ kind: 'refused', why: 'The kernel was restarted.' });
  expect(operations.open).toBeNull();
});
