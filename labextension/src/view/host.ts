/** The view's host: JupyterLab's panel, or anywidget. */

import type { Answer, Request } from './protocol';

/** The host's connection to the kernel, for the view to say where there is nothing to show. */
export type HostState =
  | { kind: 'ok' }
  | { kind: 'no_kernel' }
  /** `problem`: of the last attempt to load it, until a cell has run. */
  | { kind: 'not_loaded'; notebook: string; problem?: LoadProblem }
  /** A kernel of another language, by the name that the kernel or its specification gives. */
  | { kind: 'not_python'; notebook: string; language: string }
  /** `waits`: for the end of the cell that runs. */
  | { kind: 'loading'; notebook: string; waits: boolean }
  | { kind: 'disconnected' }
  | { kind: 'restarting' }
  /** The kernel that a widget in a notebook was of is gone. */
  | { kind: 'gone' }
  | { kind: 'dead' };

/** Why nbguard could not be loaded. */
export type LoadProblem =
  /** The environment of the kernel has no such package. `python`: path of its interpreter. */
  | { kind: 'no_package'; python: string }
  /** `error`: name and message, in the kernel's words. */
  | { kind: 'failed'; error: string }
  /** The kernel was restarted, lost, or dropped what waited for it after an error in a cell. */
  | { kind: 'not_run' }
  /** The extension is loaded, and nothing answers the panel: no ipykernel. */
  | { kind: 'not_served' };

/** The model that anywidget gives to `render`, and that the JupyterLab panel imitates. */
export interface Model {
  /** `tick`: Tick or {}; `heap`: MemoryState or {}; `host`: HostState, and `notebook`: its name, both undefined in a widget. */
  get(name: 'tick' | 'heap' | 'host' | 'notebook'): unknown;
  on(event: 'change:tick' | 'change:heap' | 'change:host' | 'change:notebook', act: () => void): void;
  on(event: 'msg:custom', act: (message: Answer) => void): void;
  off(event: string, act: (...args: never[]) => void): void;
  send(message: Request): void;
}

/** A notebook of the same server, and the memory that its kernel takes; null: not known. */
export interface OtherNotebook {
  kernel: string;
  name: string;
  nbytes: number | null;
}

/** Abilities that only some hosts have. */
export interface Host {
  /** Run `%load_ext nbguard` in the notebook's kernel; `everywhere`: also in each notebook from now on. */
  load?: (everywhere: boolean) => void;
  /** Show a cell in the notebook of the kernel: the one with this `id`, else the one with this number; false: it is gone. */
  goToCell?: (cell: number, id?: string) => boolean;
  /** Name of the notebook of the kernel with this id; null: it has none that is known here. */
  nameOf?: (kernel: string) => string | null;
  /** The other notebooks of this server whose kernels have nbguard. */
  others?: () => readonly OtherNotebook[];
  /** Show the notebook of the kernel with this id. */
  goToNotebook?: (kernel: string) => void;
  /** Translate an English sentence; `%1`, `%2` … stand for `args`. */
  trans?: { __(text: string, ...args: (string | number)[]): string };
}
