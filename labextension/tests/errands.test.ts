import { beforeEach, describe, expect, it } from 'vitest';

import type { Progress, Question } from '../src/view/connection';
import { Errands, type Errand } from '../src/view/errands';
import { outcome, plan } from './model';

/** A line to a kernel: what was asked, and a way to answer it. */
class Line {
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

let line: Line;
let errands: Errands;

beforeEach(() => {
  line = new Line();
  errands = new Errands(line, () => undefined, 'The kernel was restarted.');
});

/** The errand whose plan is shown. */
function shown(): Errand {
  errands.start({ action: 'clean_stale', title: 'Clean stale' });
  line.say({ op: 'plan', plan });
  return the(errands.open);
}

function waiting(): Errand {
  return the(errands.waiting[0]);
}

function the(errand: Errand | null | undefined): Errand {
  if (!errand) {
    throw new Error('there is no such errand');
  }
  return errand;
}

describe('an errand', () => {
  it('is planned, agreed to by its token, and done', () => {
    const errand = shown();
    errands.confirm(errand);
    expect(line.asked).toEqual([
      { op: 'plan', action: 'clean_stale' },
      { op: 'apply', token: 'token-1' }
    ]);
    line.say({ op: 'done', outcome });
    expect(errands.open).toBeNull();
    expect(errands.result).toEqual({ kind: 'done', outcome });
  });

  it('is planned anew without the steps that are left out; only the last plan counts', () => {
    const errand = shown();
    errands.toggle(errand, 'Out[9]', true);
    errands.confirm(errand);
    expect(line.asked).toHaveLength(2);
    errands.toggle(errand, 'last error', true);
    expect(line.asked[2]).toEqual({ op: 'plan', action: 'clean_stale', keep: ['last error', 'Out[9]'] });
    line.say({ op: 'plan', plan: { ...plan, token: 'old' } }, 1);
    expect(errand.plan?.token).toBe('');
    line.say({ op: 'plan', plan: { ...plan, token: 'new' } });
    expect(errand.plan?.token).toBe('new');
  });

  it('is asked about again if the plan would do something else by now', () => {
    const errand = shown();
    errands.confirm(errand);
    line.say({ op: 'plan', plan: { ...plan, token: 'token-2' } });
    expect(errands.open).toBe(errand);
    expect(errand.isRevised).toBe(true);
    errands.confirm(errand);
    expect(line.asked[2]).toEqual({ op: 'apply', token: 'token-2' });
  });

  it('is under way once, and gives the table to the next', () => {
    errands.start({ action: 'clean_stale', title: 'Clean stale' });
    errands.start({ action: 'clean_stale', title: 'Clean stale' });
    expect(line.asked).toHaveLength(1);
    line.say({ op: 'plan', plan });
    errands.start({ action: 'release', title: 'Release a', heap: 7, ids: [2] });
    expect(errands.open).toBeNull();
    expect(line.asked[1]).toEqual({ op: 'plan', action: 'release', heap: 7, ids: [2] });
    expect(errands.isPending({ action: 'release', title: '', heap: 7, ids: [2] })).toBe(true);
    expect(errands.isPending({ action: 'release', title: '', heap: 7, ids: [3] })).toBe(false);
  });
});

describe('what waits', () => {
  it('says that it runs when the cell ends: late, or queued with what for', () => {
    const errand = shown();
    errands.confirm(errand);
    line.say({ op: 'late' });
    expect(errands.open).toBeNull();
    expect(errands.waiting).toEqual([errand]);
    line.say({ op: 'queued', why: 'In[14] uses it' });
    expect(errand).toMatchObject({ phase: 'queued', why: 'In[14] uses it' });
    line.say({ op: 'done', outcome });
    expect(errands.waiting).toEqual([]);
  });

  it('works once a late ack is there', () => {
    errands.start({ action: 'empty_cache', title: 'Empty cache' });
    line.say({ op: 'late' });
    line.say({ op: 'ack' });
    expect(waiting().phase).toBe('working');
  });

  it('can be given up; what was done all the same is told, a refusal is not', () => {
    errands.confirm(shown());
    line.say({ op: 'queued', why: 'busy' });
    errands.cancel(waiting());
    expect(line.cancelled).toEqual(['rid-1']);
    expect(errands.waiting).toEqual([]);
    line.say({ op: 'done', outcome });
    expect(errands.result).toEqual({ kind: 'done', outcome });

    errands.dismiss();
    errands.start({ action: 'empty_cache', title: 'Empty cache' });
    line.say({ op: 'late' });
    errands.cancel(waiting());
    line.say({ op: 'refused', why: 'cancelled' });
    expect(errands.result).toBeNull();
  });

  it('is off the list when another view has cancelled it', () => {
    errands.confirm(shown());
    line.say({ op: 'queued', why: 'busy' });
    errands.reconcile([]);
    expect(errands.waiting).toHaveLength(1);
    errands.reconcile([{ rid: 'rid-1', title: 'Clean stale', phase: 'queued', why: 'busy' }]);
    expect(errands.waiting).toHaveLength(1);
    errands.reconcile([]);
    expect(errands.waiting).toEqual([]);
  });
});

it('says in words what was refused, and that the kernel is gone', () => {
  errands.start({ action: 'release', title: 'Release learn', heap: 7, ids: [0] });
  line.say({ op: 'refused', why: 'it trains' });
  expect(errands.result).toEqual({ kind: 'refused', title: 'Release learn', why: 'it trains' });
  errands.confirm(shown());
  line.say({ op: 'lost' });
  expect(errands.result).toMatchObject({ kind: 'refused', why: 'The kernel was restarted.' });
  expect(errands.open).toBeNull();
});
