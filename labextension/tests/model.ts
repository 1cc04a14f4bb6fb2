/// <reference types="node" />
/** The other end of a view: a host's model with the scenes of tests/data/sidebar, and a kernel that answers. */

import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import type { HostState, Model } from '../src/view/host';
import type { Answer, LineHistory, MemoryState, OutcomeView, PlanView, Request, Tick, WhyView } from '../src/view/protocol';

export type Scene = 'hostile' | 'idle' | 'many' | 'oom' | 'parked' | 'stale' | 'training';

/** An answer before it has a `rid`. */
type Said = Answer extends infer T ? (T extends Answer ? Omit<T, 'rid'> : never) : never;

export function scene(name: Scene): { tick: Tick; heap: MemoryState; history: LineHistory } {
  const path = join(import.meta.dirname, '../../tests/data/sidebar', `${name}.json`);
  return JSON.parse(readFileSync(path, 'utf8')) as { tick: Tick; heap: MemoryState; history: LineHistory };
}

export class FakeModel implements Model {
  readonly sent: Request[] = [];
  private readonly state: { tick: object; heap: object; host?: HostState; notebook?: string };
  private readonly listeners = new Map<string, Set<(...args: never[]) => void>>();

  constructor(state: { tick: object; heap: object; host?: HostState; notebook?: string } = { tick: {}, heap: {} }) {
    this.state = { ...state };
  }

  get(name: 'tick' | 'heap' | 'host' | 'notebook'): unknown {
    return this.state[name];
  }

  on(event: string, act: (...args: never[]) => void): void {
    this.listeners.set(event, (this.listeners.get(event) ?? new Set()).add(act));
  }

  off(event: string, act: (...args: never[]) => void): void {
    this.listeners.get(event)?.delete(act);
  }

  send(message: Request): void {
    this.sent.push(structuredClone(message));
  }

  set(change: { tick?: object; heap?: object; host?: HostState; notebook?: string }): void {
    Object.assign(this.state, change);
    for (const name of Object.keys(change)) {
      this.listeners.get(`change:${name}`)?.forEach(act => {
        (act)();
      });
    }
  }

  /** Answer the last request of a kind. */
  say(op: Request['op'], said: Said): void {
    const { rid } = this.last(op) as { rid: string };
    this.listeners.get('msg:custom')?.forEach(act => {
      (act as (answer: Answer) => void)({ ...said, rid });
    });
  }

  all(op: Request['op']): Request[] {
    return this.sent.filter(request => request.op === op);
  }

  last(op: Request['op']): Request {
    const found = this.all(op);
    const request = found[found.length - 1];
    if (request === undefined) {
      throw new Error(`no ${op} was sent`);
    }
    return request;
  }

  get listening(): number {
    return [...this.listeners.values()].reduce((sum, acts) => sum + acts.size, 0);
  }
}

export const plan: PlanView = {
  token: 'token-1',
  action: 'clean_stale',
  title: 'Clean stale: the plan',
  confirm: 'Free 3.67 GiB',
  rows: [
    { label: 'last error released', detail: '%debug still works', nbytes: 3274702848, key: 'last error', kept: false },
    { label: 'Out[9] forgotten', detail: '', nbytes: 643825664, key: 'Out[9]', kept: false },
    { label: 'unreachable cycles collected', detail: '', nbytes: 20971520, key: '', kept: false }
  ],
  promised: 3939500032,
  when: 'now',
  why: '',
  irreversible: '',
  skipped: ['learn trains: left alone'],
  refused: ''
};

export const outcome: OutcomeView = {
  action: 'clean_stale',
  title: 'Clean stale',
  sentence: 'Freed 3.05 GiB of 3.67 GiB promised.',
  promised: 3939500032,
  realised: 3274702848,
  extra: 0,
  done: ['last error: 2 variables of 1 frame released'],
  undone: [['Out[9]', 'a thread runs with it']],
  undo: ['emb']
};

export const why: WhyView = {
  name: 'losses',
  what: 'list of 118',
  nbytes: 2039480320,
  paths: [
    ['losses → [0] → grad_fn', 13, false, 'losses = [each.item() for each in losses]', 'frees its memory'],
    ['last error → fit → losses', 12, true, '%reset_gpu', 'frees all that is stale']
  ],
  more: []
};
