/**
 * What goes over the wire between a kernel and its sidebars: `nbguard/sidebar/protocol/state.py` in TypeScript.
 * Sizes are bytes, times seconds since the epoch. docs/protocol.md says who sends what when.
 */

export const PROTOCOL = 1;

export type ActionName = 'clean_stale' | 'empty_cache' | 'release' | 'park' | 'unpark' | 'stop_workers';
export type Ability = 'why' | 'release' | 'park' | 'unpark';

export interface Part {
  name: string;
  nbytes: number;
  note: string;
}

export interface DeviceTick {
  device: string;
  name: string;
  total: number | null;
  parts: Part[];
  peak: number | null;
  /** [time, bytes in use by this kernel], oldest first. */
  spark: [number, number][];
}

export interface FitTick {
  label: string;
  call: string;
  epoch: number | null;
  epochs: number | null;
  batch: number | null;
  batches: number | null;
  is_training: boolean;
  loss: number | null;
  peak: number | null;
  /** Share (0 to 1) of the moments looked at in which the fit waited for data. */
  waiting: number | null;
}

export interface JobStatus {
  rid: string;
  title: string;
  phase: 'queued' | 'running';
  why: string;
}

export interface TimeMark {
  t: number;
  label: string;
}

/** What the counters say now. Whole and small: a client that joins late is right at the next one. */
export interface Tick {
  v: number;
  boot: string;
  n: number;
  t: number;
  /** Number of the `MemoryState` that goes with it. */
  heap: number;
  /** `cuda`, `cpu`, `mps`, `simulated`; empty before PyTorch is imported. */
  tracked: string;
  busy: boolean;
  cell: number | null;
  devices: DeviceTick[];
  fit: FitTick | null;
  jobs: JobStatus[];
  marks: TimeMark[];
}

export interface HolderRow {
  id: number;
  label: string;
  kind: string;
  what: string;
  path: string;
  device: string;
  nbytes: number;
  reaches: number;
  cell: number | null;
  stale: boolean;
  can: Ability[];
}

export interface Experiment {
  id: number | null;
  label: string;
  summary: string;
  nbytes: number;
  state: 'training' | 'live' | 'stale' | 'parked';
  cell: number | null;
  workers: number;
  note: string;
  can: Ability[];
}

export type PieceKind = 'allocated' | 'releasable' | 'stranded' | 'kept';

export interface Strip {
  segments: number;
  nbytes: number;
  pieces: [PieceKind, number][];
}

export interface DeviceSegments {
  device: string;
  segments: number;
  strips: Strip[];
  largest_now: number | null;
  largest_flushed: number | null;
  sentence: string;
}

export interface FixRow {
  words: string;
  nbytes: number | null;
  commands: string[];
}

export interface OomView {
  title: string;
  sentence: string;
  fixes: FixRow[];
}

/** What a look at the heap found. */
export interface MemoryState {
  v: number;
  boot: string;
  heap: number;
  t: number;
  seconds: number;
  cell: number | null;
  stale: number;
  holders: HolderRow[];
  /** Holders that are not listed: [how many, bytes]. */
  more: [number, number];
  experiments: Experiment[];
  devices: DeviceSegments[];
  /** [sentence, command]; code stands between backticks. */
  findings: [string, string][];
  oom: OomView | null;
}

export interface PlanRow {
  label: string;
  detail: string;
  nbytes: number | null;
  key: string;
  kept: boolean;
}

export interface PlanView {
  token: string;
  action: ActionName;
  title: string;
  confirm: string;
  rows: PlanRow[];
  promised: number;
  when: 'now' | 'cell_end';
  why: string;
  irreversible: string;
  skipped: string[];
  refused: string;
}

export interface OutcomeView {
  action: ActionName;
  title: string;
  sentence: string;
  promised: number;
  realised: number;
  extra: number;
  undone: [string, string][];
  undo: string[];
}

export interface WhyView {
  name: string;
  what: string;
  nbytes: number;
  /** [path, cell, stale, the line that cuts it]. */
  paths: [string, number | null, boolean, string][];
  more: [string, number][];
}

/** What a view sends. `rid` is chosen by the view and comes back in every answer. */
export type Request =
  | { op: 'hello'; client: string; visible: boolean; boot?: string; heap?: number }
  | { op: 'bye'; client: string }
  | { op: 'refresh'; rid: string }
  | { op: 'why'; rid: string; heap: number; id: number }
  | { op: 'plan'; rid: string; action: ActionName; heap?: number; ids?: number[]; names?: string[]; keep?: string[] }
  | { op: 'apply'; rid: string; token: string }
  | { op: 'cancel'; rid: string };

/** What a view gets, besides ticks and heaps. */
export type Answer =
  | { op: 'ack'; rid: string }
  | { op: 'queued'; rid: string; why: string }
  | { op: 'why'; rid: string; why: WhyView }
  | { op: 'plan'; rid: string; plan: PlanView }
  | { op: 'done'; rid: string; outcome: OutcomeView }
  | { op: 'refused'; rid: string; why: string };

/** How the host stands with the kernel, in words for the view where there is nothing to show. */
export type HostState =
  | { kind: 'ok' }
  | { kind: 'no_kernel' }
  | { kind: 'not_loaded'; notebook: string }
  /** `waits`: for the end of the cell that runs. */
  | { kind: 'loading'; notebook: string; waits: boolean }
  | { kind: 'disconnected' }
  | { kind: 'restarting' }
  | { kind: 'dead' };

/** What anywidget gives to `render`, and what the JupyterLab panel imitates. */
export interface Model {
  /** `tick`: Tick or {}; `heap`: MemoryState or {}; `host`: HostState, undefined in a widget. */
  get(name: 'tick' | 'heap' | 'host'): unknown;
  on(event: 'change:tick' | 'change:heap' | 'change:host', act: () => void): void;
  on(event: 'msg:custom', act: (message: Answer) => void): void;
  off(event: string, act: (...args: never[]) => void): void;
  send(message: Request): void;
}

/** What only some hosts can do. */
export interface Host {
  /** Run `%load_ext nbguard` in the notebook's kernel. */
  load?: () => void;
  /** Translate an English sentence; `%1`, `%2` … stand for `args`. */
  trans?: { __(text: string, ...args: (string | number)[]): string };
}
