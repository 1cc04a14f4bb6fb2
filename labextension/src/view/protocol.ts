/**
 * The messages between a kernel and its sidebars. Sizes are bytes, times seconds since the epoch.
 *
 * Made from nbguard/frontend/sidebar/protocol (state, answers, messages) by `make protocol`: change that. docs/protocol.md says
 * which message is sent when. Beside each type that a kernel sends stands its check: a value that fails it is dropped.
 */

import { boolean, list, nullable, number, object, oneOf, text, tuple, variants, type Check } from './check';

export const PROTOCOL = 5;

/** Everything that a sidebar can have done. Each is planned first and applied by the plan's token. */
export type ActionName = 'clean_stale' | 'empty_cache' | 'release' | 'park' | 'unpark' | 'stop_workers';

export const isActionName: Check<ActionName> = oneOf('clean_stale', 'empty_cache', 'release', 'park', 'unpark', 'stop_workers');

/**
 * A request that a view may make about a row. `clean` is the plan of Clean stale, which lets the row go; `predict`
 * asks for the memory of a Learner's next fit.
 */
export type Ability = 'why' | 'release' | 'park' | 'unpark' | 'clean' | 'predict';

export const isAbility: Check<Ability> = oneOf('why', 'release', 'park', 'unpark', 'clean', 'predict');

/** The state of a piece of a segment: `kept` is free in a private pool that something still uses. */
export type PieceKind = 'allocated' | 'releasable' | 'stranded' | 'kept';

export const isPieceKind: Check<PieceKind> = oneOf('allocated', 'releasable', 'stranded', 'kept');

/** The moment at which a plan is done once it is agreed to. */
export type Now = 'now' | 'cell_end';

export const isNow: Check<Now> = oneOf('now', 'cell_end');

/** The key of a part, in JSON and on the wire to a sidebar: it stays when the words for people change. */
export type DevicePart = 'allocated' | 'releasable' | 'stranded' | 'graph pools' | 'pending' | 'cached' | 'context' | 'libraries' | 'others' | 'others and contexts' | 'driver' | 'free' | 'spilled' | 'process';

export const isDevicePart: Check<DevicePart> = oneOf('allocated', 'releasable', 'stranded', 'graph pools', 'pending', 'cached', 'context', 'libraries', 'others', 'others and contexts', 'driver', 'free', 'spilled', 'process');

/**
 * A stretch of a device's line: one reading, equal readings in a row, or all readings in a bucket of time. `since`:
 * time of the first reading. `until`: time of the last reading. `low`: least bytes allocated in it. `high`: most
 * bytes allocated in it, between readings too where the allocator's peak counter has risen. `allocated`: bytes in
 * use by this kernel at the last reading: in tensors, or by its process where they are not counted. `reserved`:
 * bytes that PyTorch had of the device at the last reading. `others`: bytes in use by other processes and the
 * driver at the last reading. `free`: bytes free on the device at the last reading.
 */
export type LinePoint = [since: number, until: number, low: number, high: number, allocated: number, reserved: number | null, others: number | null, free: number | null];

export const isLinePoint: Check<LinePoint> = tuple(number, number, number, number, number, nullable(number), nullable(number), nullable(number));

/** The line of one device. */
export interface DeviceLine {
  device: string;
  /** Oldest first. */
  points: LinePoint[];
}

export const isDeviceLine: Check<DeviceLine> = object({
  device: text,
  points: list(isLinePoint)
});

/**
 * The most that was allocated on one device while a cell ran, in bytes. `is_exact`: the allocator's peak counter
 * rose in the cell; false: the most of the readings, at least that.
 */
export type DevicePeak = [device: string, nbytes: number, is_exact: boolean];

export const isDevicePeak: Check<DevicePeak> = tuple(text, number, boolean);

/** A mark on the time axis: a cell, an epoch of a fit, or a request for memory that failed. */
export interface TimeMark {
  kind: 'cell' | 'epoch' | 'request';
  /** In words: `In[12]`, `epoch 2`, `6 GiB asked`. */
  label: string;
  /** It began, or failed. */
  t: number;
  /** It ended; None if it goes on. */
  end: number | null;
  /** Number of the cell, or of the one that made the request. */
  cell: number | null;
  /** Number of the epoch, from 1 on. */
  epoch: number | null;
  /** The id of the cell in its notebook, where the frontend tells it. */
  cell_id: string;
  /** Of a cell, by device. */
  peaks: DevicePeak[];
  /** Of a request; empty if unknown. */
  device: string;
  /** That the request asked for. */
  nbytes: number;
}

export const isTimeMark: Check<TimeMark> = object({
  kind: oneOf('cell', 'epoch', 'request'),
  label: text,
  t: number,
  end: nullable(number),
  cell: nullable(number),
  epoch: nullable(number),
  cell_id: text,
  peaks: list(isDevicePeak),
  device: text,
  nbytes: number
});

/** The lines of all devices over a span of time up to the last tick, in few points, with the marks of that time. */
export interface LineHistory {
  /** Of the span that was asked for; 0 for all that is kept. */
  seconds: number;
  /** Number of the last tick in it. */
  n: number;
  lines: DeviceLine[];
  /** Oldest first. */
  marks: TimeMark[];
}

export const isLineHistory: Check<LineHistory> = object({
  seconds: number,
  n: number,
  lines: list(isDeviceLine),
  marks: list(isTimeMark)
});

/** A line of a cell that `nbguard lint` reports. */
export interface CellFinding {
  /** Place of the cell among those that were sent, from 0. */
  cell: number;
  /** Of the cell, from 1. */
  line: number;
  /** Of the rule: `NBG101`. */
  code: string;
  message: string;
}

export const isCellFinding: Check<CellFinding> = object({
  cell: number,
  line: number,
  code: text,
  message: text
});

/**
 * A way from a root that keeps a holder alive. `cell`: number of the cell that bound its name. `stale`: Clean stale
 * would cut it. `release`: the line of code that cuts it; empty if none. `effect`: effect of that line in a few
 * words; empty if none.
 */
export type KeptPath = [path: string, cell: number | null, stale: boolean, release: string, effect: string];

export const isKeptPath: Check<KeptPath> = tuple(text, nullable(number), boolean, text, text);

/** Paths of one root that are not listed one by one. */
export type MorePaths = [root: string, paths: number];

export const isMorePaths: Check<MorePaths> = tuple(text, number);

/** The ways from roots that keep a holder alive. */
export interface WhyView {
  name: string;
  /** The object in words. */
  what: string;
  /** It leads to. */
  nbytes: number;
  paths: KeptPath[];
  more: MorePaths[];
}

export const isWhyView: Check<WhyView> = object({
  name: text,
  what: text,
  nbytes: number,
  paths: list(isKeptPath),
  more: list(isMorePaths)
});

/** A stretch of a segment. */
export type Piece = [kind: PieceKind, nbytes: number];

export const isPiece: Check<Piece> = tuple(isPieceKind, number);

/** One segment, or some neighbours drawn as one. */
export interface Strip {
  /** Drawn as this strip. */
  segments: number;
  nbytes: number;
  /** By address, or added up by kind. */
  pieces: Piece[];
}

export const isStrip: Check<Strip> = object({
  segments: number,
  nbytes: number,
  pieces: list(isPiece)
});

/** A holder at a moment of the history. */
export type HeldThen = [label: string, nbytes: number];

export const isHeldThen: Check<HeldThen> = tuple(text, number);

/** A device after an event of the allocator's recorded history. */
export interface MomentView {
  /** Its number. */
  device: number;
  /** That have a history. */
  devices: number[];
  /** 0 is the time before the first. */
  event: number;
  /** Number of the last. */
  events: number;
  /** Number of the first event after which most was allocated. */
  peak: number;
  /** Number of the first request that found no memory. */
  refused: number | null;
  /** On the event, and on the peak. */
  sentences: string[];
  /** Bytes allocated at most in each stretch of the history, which are equally long. */
  course: number[];
  /** Then. */
  segments: number;
  strips: Strip[];
  /** The largest, then all others as one. */
  holders: HeldThen[];
}

export const isMomentView: Check<MomentView> = object({
  device: number,
  devices: list(number),
  event: number,
  events: number,
  peak: number,
  refused: nullable(number),
  sentences: list(text),
  course: list(number),
  segments: number,
  strips: list(isStrip),
  holders: list(isHeldThen)
});

/** One step of a plan. */
export interface PlanRow {
  label: string;
  detail: string;
  /** It gives back; None if unknown. */
  nbytes: number | null;
  /** Listed under `keep` by a request that leaves the step out. */
  key: string;
  /** It is left out. */
  kept: boolean;
}

export const isPlanRow: Check<PlanRow> = object({
  label: text,
  detail: text,
  nbytes: nullable(number),
  key: text,
  kept: boolean
});

/** A plan to agree to. */
export interface PlanView {
  /** Applies it; empty if there is nothing to apply, and `refused` says why. */
  token: string;
  action: ActionName;
  title: string;
  /** The button's words. */
  confirm: string;
  rows: PlanRow[];
  /** Bytes. */
  promised: number;
  when: Now;
  /** The reason why it waits until the cell ends. */
  why: string;
  /** The loss that cannot be undone; empty if none. */
  irreversible: string;
  /** Sentences about what is left alone. */
  skipped: string[];
  refused: string;
}

export const isPlanView: Check<PlanView> = object({
  token: text,
  action: isActionName,
  title: text,
  confirm: text,
  rows: list(isPlanRow),
  promised: number,
  when: isNow,
  why: text,
  irreversible: text,
  skipped: list(text),
  refused: text
});

/** A step that was not done. */
export type UndoneStep = [label: string, reason: string];

export const isUndoneStep: Check<UndoneStep> = tuple(text, text);

/** The outcome of a plan, measured. */
export interface OutcomeView {
  action: ActionName;
  title: string;
  sentence: string;
  /** Bytes. */
  promised: number;
  /** Bytes of these that came back. */
  realised: number;
  /** Bytes that came back beyond the promised ones. */
  extra: number;
  /** Steps that were taken, in words. */
  done: string[];
  undone: UndoneStep[];
  /** Names that bring parked objects back (`unpark`). */
  undo: string[];
}

export const isOutcomeView: Check<OutcomeView> = object({
  action: isActionName,
  title: text,
  sentence: text,
  promised: number,
  realised: number,
  extra: number,
  done: list(text),
  undone: list(isUndoneStep),
  undo: list(text)
});

/** One part of a device's memory, or one figure of the host's. */
export interface Part {
  /** A `DevicePart`; of the host's figures their words. */
  name: string;
  nbytes: number;
  /** Explanation in a few words. */
  note: string;
}

export const isPart: Check<Part> = object({
  name: text,
  nbytes: number,
  note: text
});

/** The largest request that would succeed, in bytes. `flushed`: after the cache was emptied. */
export type FittingRequest = [now: number, flushed: number];

export const isFittingRequest: Check<FittingRequest> = tuple(number, number);

/** One device by its counters. */
export interface DeviceTick {
  /** Torch's name: `cuda:0`, `cpu`. */
  device: string;
  /** The model, as the driver calls it. */
  name: string;
  /** Memory of the device; None if unknown. */
  total: number | null;
  /** Add up to `total`, where that is known. */
  parts: Part[];
  /** The most that was allocated, as torch counts it. */
  peak: number | null;
  /** The newest reading for its line; None if this kernel has not used the device. */
  line: LinePoint | null;
  /** By the blocks of the last scan and the memory free now; None if blocks changed since. */
  fits: FittingRequest | null;
}

export const isDeviceTick: Check<DeviceTick> = object({
  device: text,
  name: text,
  total: nullable(number),
  parts: list(isPart),
  peak: nullable(number),
  line: nullable(isLinePoint),
  fits: nullable(isFittingRequest)
});

/** The fit that runs now, read from the frames of a Learner's fit; None where it is not known. */
export interface FitTick {
  /** The Learner, as one would write it. */
  label: string;
  /** The Learner's method that was called: `fit_one_cycle`. */
  call: string;
  /** From 1 on. */
  epoch: number | null;
  /** In all. */
  epochs: number | null;
  /** Of this epoch, from 1 on. */
  batch: number | null;
  /** Of this epoch in all. */
  batches: number | null;
  /** False: it validates. */
  is_training: boolean;
  /** Smoothed, of the last batch, from the Learner's Recorder. */
  loss: number | null;
  /** The most that was allocated during this fit. */
  peak: number | null;
  /** Share (0 to 1) of the moments of the fit waiting for data; None while they are few. */
  waiting: number | null;
}

export const isFitTick: Check<FitTick> = object({
  label: text,
  call: text,
  epoch: nullable(number),
  epochs: nullable(number),
  batch: nullable(number),
  batches: nullable(number),
  is_training: boolean,
  loss: nullable(number),
  peak: nullable(number),
  waiting: nullable(number)
});

/** A request of some view that is not done yet. */
export interface JobStatus {
  /** The request's id, chosen by the view that sent it. */
  rid: string;
  /** In words. */
  title: string;
  phase: 'queued' | 'running';
  /** The reason why it waits while it is `queued`. */
  why: string;
}

export const isJobStatus: Check<JobStatus> = object({
  rid: text,
  title: text,
  phase: oneOf('queued', 'running'),
  why: text
});

/**
 * Another notebook or program on one of the kernel's devices, with all its processes there, from NVML. `kernel`: id
 * of the kernel that it is; empty if it is none, or nothing tells. `name`: file name of its notebook, else its
 * program, else its user; empty if nothing tells. `nbytes`: it has on the device; None if the driver does not say.
 */
export type Neighbour = [device: string, kernel: string, name: string, nbytes: number | null];

export const isNeighbour: Check<Neighbour> = tuple(text, text, text, nullable(number));

/** The counters now. Whole and small: a view that joins late is right at the next one. */
export interface Tick {
  /** Names this run of the kernel. */
  boot: string;
  /** Counts its ticks. */
  n: number;
  t: number;
  /** Number of the `MemoryState` that goes with it. */
  heap: number;
  /** Number of the last cell whose end left memory as in that state. */
  heap_cell: number | null;
  /** `cuda`, `cpu`, `mps`, `simulated`; empty before PyTorch is imported. */
  tracked: string;
  /** A cell runs. */
  busy: boolean;
  /** Number of the cell that runs. */
  cell: number | null;
  devices: DeviceTick[];
  fit: FitTick | null;
  /** How a training of this cell, or the last, went on after it ran out of memory, or why not. */
  survived: string[];
  /** The one that runs first. */
  jobs: JobStatus[];
  /** The newest, and the last run of the cell that runs; oldest first. */
  marks: TimeMark[];
  /** The largest first, at most 8. */
  neighbours: Neighbour[];
  v: number;
}

export const isTick: Check<Tick> = object({
  boot: text,
  n: number,
  t: number,
  heap: number,
  heap_cell: nullable(number),
  tracked: text,
  busy: boolean,
  cell: nullable(number),
  devices: list(isDeviceTick),
  fit: nullable(isFitTick),
  survived: list(text),
  jobs: list(isJobStatus),
  marks: list(isTimeMark),
  neighbours: list(isNeighbour),
  v: number
});

/** A part of a row's bytes. `label`: in the words of a training loop: `model`, `gradients`. */
export type RowPart = [label: string, nbytes: number];

export const isRowPart: Check<RowPart> = tuple(text, number);

/** A holder of memory: a name, a displayed result, an error. */
export interface HolderRow {
  /** Names the row in requests, as long as the state's number is the same. */
  id: number;
  /** As one would write it. */
  label: string;
  /** The kind of root that leads to it: `name`, `out`, `error` … */
  kind: string;
  /** The object in words: `Learner · Net · Adam`. */
  what: string;
  /** The way from the label to the memory. */
  path: string;
  /** Its name where a path has no room: `error in fit()`; empty if its label does. */
  short: string;
  device: string;
  /** Its own: all rows add up; of a name, those which its release frees. */
  nbytes: number;
  /** Bytes that `release` gives back, by its plan: with the names in `together`, where there are any. */
  frees: number;
  /** Bytes that it leads to. */
  reaches: number;
  /** Names that `release` takes along, as the row frees next to nothing by itself. */
  together: string[];
  /** Too small for a row, a badge or a button of its own: one line for all that are. */
  is_small: boolean;
  /** Number of the cell that bound the name. */
  cell: number | null;
  /** Clean stale would let all of it go. */
  stale: boolean;
  /** Bytes of the row that Clean stale gives back, by its plan. */
  stale_bytes: number;
  /** `nbytes` and `reaches` are lower bounds: the row leads to something that the scan left out. */
  at_least: boolean;
  /** Add up to `nbytes`; empty if the row is one thing. */
  parts: RowPart[];
  /** Held by nothing but functions that run now. */
  is_running: boolean;
  /** Why it cannot be released from here, or what does it, in words. */
  note: string;
  /** Requests that may be made about it. */
  can: Ability[];
}

export const isHolderRow: Check<HolderRow> = object({
  id: number,
  label: text,
  kind: text,
  what: text,
  path: text,
  short: text,
  device: text,
  nbytes: number,
  frees: number,
  reaches: number,
  together: list(text),
  is_small: boolean,
  cell: nullable(number),
  stale: boolean,
  stale_bytes: number,
  at_least: boolean,
  parts: list(isRowPart),
  is_running: boolean,
  note: text,
  can: list(isAbility)
});

/** Holders that are too many to be listed. */
export type UnlistedHolders = [holders: number, nbytes: number];

export const isUnlistedHolders: Check<UnlistedHolders> = tuple(number, number);

/** A Learner, or something parked. */
export interface Experiment {
  /** Of its row among the holders; None if parked, or it has no row of its own. */
  id: number | null;
  label: string;
  /** Model, optimizer, data. */
  summary: string;
  /** It leads to. */
  nbytes: number;
  state: 'training' | 'live' | 'stale' | 'parked';
  /** Number of the cell that bound the name. */
  cell: number | null;
  /** Worker processes of its DataLoaders. */
  workers: number;
  /** The keeper of a stale one, the place of a parked one. */
  note: string;
  can: Ability[];
}

export const isExperiment: Check<Experiment> = object({
  id: nullable(number),
  label: text,
  summary: text,
  nbytes: number,
  state: oneOf('training', 'live', 'stale', 'parked'),
  cell: nullable(number),
  workers: number,
  note: text,
  can: list(isAbility)
});

/** The segments of a device, from the allocator's snapshot. */
export interface DeviceSegments {
  device: string;
  /** In all. */
  segments: number;
  strips: Strip[];
  /** The largest request that would succeed. */
  largest_now: number | null;
  /** The same after the cache was emptied. */
  largest_flushed: number | null;
  /** The holder that stands in the way of more. */
  sentence: string;
}

export const isDeviceSegments: Check<DeviceSegments> = object({
  device: text,
  segments: number,
  strips: list(isStrip),
  largest_now: nullable(number),
  largest_flushed: nullable(number),
  sentence: text
});

/**
 * A finding: code stands between backticks. `command`: a line of code that does something about it; empty if none.
 * `learner`: the Learner that it is about while no fit runs on it; empty if it always holds. `key`: names it in a
 * request to dismiss it. `cell`: number of the cell that it is about; None for none.
 */
export type FindingLine = [sentence: string, command: string, learner: string, key: string, cell: number | null];

export const isFindingLine: Check<FindingLine> = tuple(text, text, text, text, nullable(number));

/** A remedy that would let a failed request through. */
export interface FixRow {
  words: string;
  /** It gives back. */
  nbytes: number | null;
  /** Lines of code that do it. */
  commands: string[];
}

export const isFixRow: Check<FixRow> = object({
  words: text,
  nbytes: nullable(number),
  commands: list(text)
});

/** The last error, if it ran out of memory. */
export interface OomView {
  title: string;
  /** The bytes that were asked for, and those that can be allocated now. */
  sentence: string;
  /** Best first. */
  fixes: FixRow[];
  /** Names it in a request to dismiss it. */
  key: string;
  /** Number of the cell that failed. */
  cell: number | null;
}

export const isOomView: Check<OomView> = object({
  title: text,
  sentence: text,
  fixes: list(isFixRow),
  key: text,
  cell: nullable(number)
});

/** The result of a scan: holders, experiments, segments, findings. */
export interface MemoryState {
  /** Names this run of the kernel. */
  boot: string;
  /** Number of this state: requests about its rows name it. */
  heap: number;
  /** The scan began. */
  t: number;
  /** It took. */
  seconds: number;
  /** Number of the last cell that had ended. */
  cell: number | null;
  /** Number of the cell that it was made in the middle of; None between cells. */
  during: number | null;
  /** Bytes that Clean stale would give back. */
  stale: number;
  /** Least bytes of a thing with its own row, badge or primary button. */
  least: number;
  /** Largest first. */
  holders: HolderRow[];
  more: UnlistedHolders;
  /** The one that trains first. */
  experiments: Experiment[];
  devices: DeviceSegments[];
  findings: FindingLine[];
  /** On objects that cells deleted and that are still there, the latest first. */
  notices: FindingLine[];
  oom: OomView | null;
  v: number;
}

export const isMemoryState: Check<MemoryState> = object({
  boot: text,
  heap: number,
  t: number,
  seconds: number,
  cell: nullable(number),
  during: nullable(number),
  stale: number,
  least: number,
  holders: list(isHolderRow),
  more: isUnlistedHolders,
  experiments: list(isExperiment),
  devices: list(isDeviceSegments),
  findings: list(isFindingLine),
  notices: list(isFindingLine),
  oom: nullable(isOomView),
  v: number
});

/** The hub's answer to a request. `rid` is the request's. */
export type Answer =
  /** The request has arrived. */
  | { op: 'ack'; rid: string }
  /** The request waits. `why`: the reason, in words. */
  | { op: 'queued'; rid: string; why: string }
  /** The answer to `history`. */
  | { op: 'history'; rid: string; history: LineHistory }
  /** The answer to `picture`. `html`: the report after the last cell that ended, dated; every name is escaped. */
  | { op: 'picture'; rid: string; html: string }
  /** The answer to `lint`. */
  | { op: 'lint'; rid: string; findings: CellFinding[] }
  /** The answer to `why`. */
  | { op: 'why'; rid: string; why: WhyView }
  /** The answer to `predict`. `text`: lines: the need of the next fit, whether it fits and why, the uncounted parts. */
  | { op: 'predicted'; rid: string; text: string }
  /** The answer to `moment`. */
  | { op: 'moment'; rid: string; moment: MomentView }
  /** The answer to `plan`; to `apply`, if by now it would do anything that was not agreed to. */
  | { op: 'plan'; rid: string; plan: PlanView }
  /** The answer to `apply`. */
  | { op: 'done'; rid: string; outcome: OutcomeView }
  /** The request is not done. `why`: the reason, in words. */
  | { op: 'refused'; rid: string; why: string };

export const isAnswer: Check<Answer> = variants({
  ack: object({ rid: text }),
  queued: object({ rid: text, why: text }),
  history: object({ rid: text, history: isLineHistory }),
  picture: object({ rid: text, html: text }),
  lint: object({ rid: text, findings: list(isCellFinding) }),
  why: object({ rid: text, why: isWhyView }),
  predicted: object({ rid: text, text: text }),
  moment: object({ rid: text, moment: isMomentView }),
  plan: object({ rid: text, plan: isPlanView }),
  done: object({ rid: text, outcome: isOutcomeView }),
  refused: object({ rid: text, why: text })
});

/** A message of the hub to every view that looks. */
export type Broadcast =
  /** The counters, to every view. */
  | { op: 'tick'; tick: Tick }
  /** The result of a scan, to every view or to one that has an older. */
  | { op: 'heap'; heap: MemoryState }
  /** Nothing more comes: nbguard was unloaded, or switched off. */
  | { op: 'closed' };

/** A view's message. `rid` is chosen by it and comes back in every answer. */
export type Request =
  /**
   * A view is there. `client`: a random id of the view. `visible`: somebody can see it. `boot`: the run of the
   * kernel whose memory state it has; empty without one. `heap`: number of that state. `glance`: it shows a figure
   * or two: a tick now and then, no scan.
   */
  | { op: 'hello'; client: string; visible: boolean; boot?: string; heap?: number; glance?: boolean }
  /** A view is gone. */
  | { op: 'bye'; client: string }
  /** Scan again. */
  | { op: 'refresh'; rid: string }
  /** Send the lines over the last seconds. `seconds`: of the span, from the last tick back; 0 for all that is kept. */
  | { op: 'history'; rid: string; seconds: number }
  /** Send the picture that a saved notebook keeps of the sidebar. */
  | { op: 'picture'; rid: string }
  /**
   * Find leaks and slow lines in the code of a notebook, as `nbguard lint` does. Nothing of it is executed.
   * `cells`: the notebook's code cells.
   */
  | { op: 'lint'; rid: string; cells: string[] }
  /** Explain why a row is alive. `heap`: number of the memory state that has the row. `id`: of the row. */
  | { op: 'why'; rid: string; heap: number; id: number }
  /**
   * Predict the memory of the next fit of a row's Learner. `heap`: number of the memory state that has the row.
   * `id`: of the row.
   */
  | { op: 'predict'; rid: string; heap: number; id: number }
  /**
   * Show a moment of the allocator's recorded history. `device`: number of the device; None for the first that has
   * a history. `event`: number of the event; None for the peak.
   */
  | { op: 'moment'; rid: string; device?: number; event?: number }
  /**
   * Plan an action; nothing is touched. `heap`: number of the memory state that has the rows. `ids`: rows to
   * release or park. `names`: of parked objects to bring back; empty for all. `keep`: keys of steps to leave out.
   */
  | { op: 'plan'; rid: string; action: ActionName; heap?: number; ids?: number[]; names?: string[]; keep?: string[] }
  /** Apply a plan. `token`: of the plan. */
  | { op: 'apply'; rid: string; token: string }
  /** Drop a request that still waits. */
  | { op: 'cancel'; rid: string }
  /**
   * Show a finding, a notice or a card no longer, in any view. The next event of its kind is shown again. `key`: of
   * the finding, notice or card.
   */
  | { op: 'dismiss'; key: string };
