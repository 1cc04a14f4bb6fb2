/** The view's side of docs/protocol.md: the only place that knows who says what when. */

import { isObject } from './check';
import type { HostState, Model } from './host';
import { PROTOCOL, isAnswer, isMemoryState, isTick, type Answer, type MemoryState, type Request, type Tick } from './protocol';

const HELLO_EVERY = 5000;
const ACK_WITHIN = 1000;
const SILENT_AFTER = 2000;
const LOOK_EVERY = 500;

type Rid = Extract<Request, { rid: string }>;
type Without<T> = T extends unknown ? Omit<T, 'rid'> : never;

/** A request that is answered; the connection gives it its `rid`. */
export type Question = Without<Exclude<Rid, { op: 'cancel' }>>;

/** What becomes of a request: the kernel's answers; `late`: no ack within a second; `lost`: the kernel is gone. */
export type Progress = Answer | { op: 'late' } | { op: 'lost' };

interface Pending {
  heard: (progress: Progress) => void;
  timer: ReturnType<typeof setTimeout>;
}

/** What changed. `silent`: whether the kernel answers at all; `lost`: what was said by an earlier run of it is void. */
export type Change = 'tick' | 'heap' | 'host' | 'notebook' | 'silent' | 'lost';

export class Connection {
  tick: Tick | null = null;
  heap: MemoryState | null = null;
  host: HostState = { kind: 'ok' };
  /** No tick for 2 s although this view is looked at. */
  silent = false;
  /** The kernel speaks another version of the protocol. */
  foreign = false;

  readonly #client = randomId();
  readonly #pending = new Map<string, Pending>();
  readonly #dropped = new Set<string>();
  #timers: ReturnType<typeof setInterval>[] = [];
  #requests = 0;
  #visible = true;
  #aliveAt = Date.now();
  #boot = '';

  readonly #model: Model;
  readonly #changed: (what: Change) => void;

  constructor(
    model: Model,
    changed: (what: Change) => void
  ) {
    this.#model = model;
    this.#changed = changed;
    this.#listen('on');
  }

  #listen(how: 'on' | 'off'): void {
    this.#model[how]('change:tick', this.#onTick);
    this.#model[how]('change:heap', this.#onHeap);
    this.#model[how]('change:host', this.#onHost);
    this.#model[how]('change:notebook', this.#onNotebook);
    this.#model[how]('msg:custom', this.#onAnswer);
  }

  /** Take what the model has already, and say hello, from now on. */
  open(): void {
    this.#timers = [setInterval(this.#hello, HELLO_EVERY), setInterval(this.#look, LOOK_EVERY)];
    this.#onHeap();
    this.#onTick();
    this.#onHost();
  }

  /** Name of the kernel's notebook; empty where the host names none. */
  get notebook(): string {
    const name = this.#model.get('notebook');
    return typeof name === 'string' ? name : '';
  }

  /** Send a question; `heard` gets everything that becomes of it. Returns its `rid`. */
  ask(question: Question, heard: (progress: Progress) => void): string {
    const rid = `${this.#client}-${++this.#requests}`;
    const timer = setTimeout(() => {
      heard({ op: 'late' });
    }, ACK_WITHIN);
    this.#pending.set(rid, { heard, timer });
    this.#model.send({ ...question, rid });
    return rid;
  }

  /** Whether this view has chosen `rid`. */
  isOwn(rid: string): boolean {
    return rid.startsWith(`${this.#client}-`);
  }

  cancel(rid: string): void {
    this.#model.send({ op: 'cancel', rid });
  }

  /** Have a finding, a notice or a card shown no longer, in any view. */
  dismiss(key: string): void {
    this.#model.send({ op: 'dismiss', key });
  }

  setVisible(visible: boolean): void {
    if (visible !== this.#visible) {
      this.#visible = visible;
      this.#aliveAt = Date.now();
      this.#hello();
    }
  }

  /** Look no longer, until `open` is called again. What was asked is heard all the same. */
  rest(): void {
    if (this.#timers.length > 0) {
      this.#timers.forEach(clearInterval);
      this.#timers = [];
      this.#model.send({ op: 'bye', client: this.#client });
    }
  }

  close(): void {
    this.rest();
    this.#pending.forEach(({ timer }) => {
      clearTimeout(timer);
    });
    this.#pending.clear();
    this.#listen('off');
  }

  readonly #hello = (): void => {
    if (this.#timers.length === 0) {
      return;
    }
    const has = this.heap === null ? {} : { boot: this.heap.boot, heap: this.heap.heap };
    this.#model.send({ op: 'hello', client: this.#client, visible: this.#visible, ...has });
  };

  readonly #onTick = (): void => {
    const tick = this.#model.get('tick');
    this.foreign = isForeign(tick);
    if (isNothing(tick) || this.foreign) {
      this.tick = null;
    } else if (isTick(tick)) {
      this.tick = tick;
    } else {
      this.#drop('tick', tick);
      return;
    }
    this.#aliveAt = Date.now();
    if (this.tick !== null && this.tick.boot !== this.#boot) {
      this.#begin(this.tick.boot);
    }
    this.#changed('tick');
    this.#look();
  };

  readonly #onHeap = (): void => {
    const heap = this.#model.get('heap');
    let next: MemoryState | null = null;
    if (!isNothing(heap) && !isForeign(heap)) {
      if (!isMemoryState(heap)) {
        this.#drop('memory state', heap);
        return;
      }
      next = heap;
    }
    const isSame = next?.boot === this.heap?.boot && next?.heap === this.heap?.heap;
    if (!isSame) {
      this.heap = next;
      this.#changed('heap');
    }
  };

  readonly #onHost = (): void => {
    this.host = (this.#model.get('host') as HostState | undefined) ?? { kind: 'ok' };
    if (this.host.kind !== 'ok' && this.host.kind !== 'disconnected') {
      this.#lose();
    }
    this.#aliveAt = Date.now();
    this.#changed('host');
    this.#hello();
  };

  readonly #onNotebook = (): void => {
    this.#changed('notebook');
  };

  readonly #onAnswer = (answer: unknown): void => {
    if (!isAnswer(answer)) {
      this.#drop('answer', answer);
      return;
    }
    const pending = this.#pending.get(answer.rid);
    if (pending === undefined) {
      return;
    }
    clearTimeout(pending.timer);
    if (answer.op !== 'ack' && answer.op !== 'queued') {
      this.#pending.delete(answer.rid);
    }
    pending.heard(answer);
  };

  readonly #look = (): void => {
    const silent = this.#visible && this.tick !== null && Date.now() - this.#aliveAt > SILENT_AFTER;
    if (silent !== this.silent) {
      this.silent = silent;
      this.#changed('silent');
    }
  };

  /** Drop a message that is not as the protocol has it. The console gets the first of each kind: ticks come 4 times a second. */
  #drop(kind: 'tick' | 'memory state' | 'answer', value: unknown): void {
    if (!this.#dropped.has(kind)) {
      this.#dropped.add(kind);
      console.warn(`nbguard: the kernel has sent a malformed ${kind}, which is not shown`, value);
    }
  }

  /** Forget what is of an earlier run of the kernel. */
  #begin(boot: string): void {
    if (this.#boot !== '') {
      this.#lose();
    }
    this.#boot = boot;
    if (this.heap !== null && this.heap.boot !== boot) {
      this.heap = null;
      this.#changed('heap');
    }
  }

  #lose(): void {
    const lost = [...this.#pending.values()];
    this.#pending.clear();
    for (const { heard, timer } of lost) {
      clearTimeout(timer);
      heard({ op: 'lost' });
    }
    this.#changed('lost');
  }
}

/** Whether a host has no value yet: a widget's traits begin as {}. */
function isNothing(value: unknown): boolean {
  return value === undefined || (isObject(value) && Object.keys(value).length === 0);
}

/** Whether a value is of another version of the protocol. */
function isForeign(value: unknown): boolean {
  return isObject(value) && typeof value.v === 'number' && value.v !== PROTOCOL;
}

function randomId(): string {
  return Array.from(crypto.getRandomValues(new Uint32Array(2)), part => part.toString(36)).join('');
}
