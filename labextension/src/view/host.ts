/** The view's host: JupyterLab's panel, or anywidget. */

import type { Answer, Request } from './protocol';

/** The host's connection to the kernel, for the view to say where there is nothing to show. */
export type HostState =
  | { kind: 'ok' }
  | { kind: 'no_kernel' }
  | { kind: 'not_loaded'; notebook: string }
  /** `waits`: for the end of the cell that runs. */
  | { kind: 'loading'; notebook: string; waits: boolean }
  | { kind: 'disconnected' }
  | { kind: 'restarting' }
  | { kind: 'dead' };

/** The model that anywidget gives to `render`, and that the JupyterLab panel imitates. */
export interface Model {
  /** `tick`: Tick or {}; `heap`: MemoryState or {}; `host`: HostState, undefined in a widget. */
  get(name: 'tick' | 'heap' | 'host'): unknown;
  on(event: 'change:tick' | 'change:heap' | 'change:host', act: () => void): void;
  on(event: 'msg:custom', act: (message: Answer) => void): void;
  off(event: string, act: (...args: never[]) => void): void;
  send(message: Request): void;
}

/** Abilities that only some hosts have. */
export interface Host {
  /** Run `%load_ext nbguard` in the notebook's kernel. */
  load?: () => void;
  /** Translate an English sentence; `%1`, `%2` … stand for `args`. */
  trans?: { __(text: string, ...args: (string | number)[]): string };
}
