import type { HostState, Model } from './view/host';
import type { Answer, Request } from './view/protocol';

type Name = 'tick' | 'heap' | 'host' | 'notebook';
type Act = (message: Answer) => void;

/** What a view is drawn from, and who wants to know when it changes. */
export abstract class ObservableModel implements Model {
  constructor(host: HostState, notebook = '') {
    this.#values = { tick: {}, heap: {}, host, notebook };
  }

  abstract send(message: Request): void;

  get(name: Name): unknown {
    return this.#values[name];
  }

  on(event: string, act: Act): void {
    const acts = this.#acts.get(event) ?? new Set<Act>();
    this.#acts.set(event, acts.add(act));
  }

  off(event: string, act: (...args: never[]) => void): void {
    this.#acts.get(event)?.delete(act as Act);
  }

  protected set(name: Name, value: unknown): void {
    this.#values[name] = value;
    this.emit(`change:${name}`);
  }

  /** Call whoever listens to `event`; those who leave meanwhile are not called any more. */
  protected emit(event: string, ...message: [] | [Answer]): void {
    const acts = this.#acts.get(event);
    for (const act of [...(acts ?? [])]) {
      if (acts?.has(act)) {
        act(...(message as [Answer]));
      }
    }
  }

  readonly #values: Record<Name, unknown>;
  readonly #acts = new Map<string, Set<Act>>();
}

/** What a view is drawn from where there is no kernel. */
export class NoKernel extends ObservableModel {
  constructor() {
    super({ kind: 'no_kernel' });
  }

  send(): void {
    return;
  }
}
