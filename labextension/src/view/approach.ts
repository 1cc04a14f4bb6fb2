/**
 * A warning before a device is full: by the peak of the same cell when it ran last, by the largest step of the cell that runs,
 * and by its trend. Once per approach.
 */

import { formatBytes } from './bytes';
import type { DeviceTick, Tick } from './protocol';
import { duration, type Trans } from './words';

/** Seconds of the trend, and those from which on it is one. */
const TREND = 30;
const LEAST = 4;
/** A device that is full in more than so many seconds is not worth a word. */
const SOON = 60;
/** Share of the device that can be had above which nothing is said, and above which it is no longer near. */
const NEAR = 0.25;
const FAR = 0.33;

type Sample = readonly [t: number, available: number];

/** Parts of a device that a request can have. */
const AVAILABLE: ReadonlySet<string> = new Set(['free', 'releasable', 'cached']);

/** Parts that this kernel has for tensors at most, together with what can be had. */
const REACHABLE: ReadonlySet<string> = new Set([...AVAILABLE, 'allocated', 'stranded']);

/** Bytes that can be had of a device without letting anything go; null: not known. */
export function availableOf(device: Pick<DeviceTick, 'total' | 'parts'>): number | null {
  const parts = device.parts.filter(part => AVAILABLE.has(part.name));
  return device.total === null || !parts.some(part => part.name === 'free')
    ? null
    : parts.reduce((sum, part) => sum + part.nbytes, 0);
}

export class Approach {
  readonly #samples = new Map<string, Sample[]>();
  readonly #words = new Map<string, string>();
  /** Devices on which the last run of this cell has been spoken of. */
  readonly #spoken = new Set<string>();
  #boot = '';
  #cell: number | null = null;

  readonly #trans: Trans;

  constructor(trans: Trans) {
    this.#trans = trans;
  }

  /** Take a tick. Returns the warning that holds now; empty: nothing is near. It does not change while it holds. */
  follow(tick: Tick): string {
    if (tick.boot !== this.#boot || tick.cell !== this.#cell) {
      this.#samples.clear();
      this.#spoken.clear();
      this.#words.clear();
      this.#boot = tick.boot;
      this.#cell = tick.cell;
    }
    for (const device of tick.devices) {
      this.#look(device, tick);
    }
    return [...this.#words.values()].join(' ');
  }

  #look({ device, total, parts }: DeviceTick, tick: Tick): void {
    const available = availableOf({ total, parts });
    if (available === null || !tick.busy) {
      this.#words.delete(device);
      return;
    }
    const share = available / Math.max(1, total ?? 0);
    const samples = [...(this.#samples.get(device) ?? []), [tick.t, available] as const];
    this.#samples.set(device, samples.filter(([t]) => t >= tick.t - TREND));
    if (share > FAR && !this.#spoken.has(device)) {
      this.#words.delete(device);
    }
    if (this.#words.has(device)) {
      return;
    }
    const again = this.#spoken.has(device) ? '' : this.#byLastRun(device, parts, tick);
    if (again !== '') {
      this.#spoken.add(device);
    }
    const near = share <= NEAR ? () => this.#bySteps(device, samples, available) || this.#byTrend(device, samples, available) : () => '';
    const words = again || near();
    if (words !== '') {
      this.#words.set(device, words);
    }
  }

  /** The same cell reached more when it ran last than this kernel can have of the device now. */
  #byLastRun(device: string, parts: DeviceTick['parts'], { cell, marks }: Tick): string {
    const cells = marks.filter(mark => mark.kind === 'cell');
    const id = cells.find(mark => mark.cell === cell && mark.end === null)?.cell_id ?? '';
    const last = cells.filter(mark => mark.end !== null && mark.cell_id === id).pop();
    const peak = id === '' ? undefined : last?.peaks.find(([name]) => name === device)?.[1];
    const reachable = parts.reduce((sum, part) => sum + (REACHABLE.has(part.name) ? part.nbytes : 0), 0);
    return peak !== undefined && peak > reachable
      ? this.#trans.__('%1 may not have room for this cell: it reached %2 when it ran last, and %3 can be allocated.', device, ...sizes(peak, reachable))
      : '';
  }

  /** The largest step of this cell so far would not fit once more. */
  #bySteps(device: string, samples: readonly Sample[], available: number): string {
    const steps = samples.slice(1).map(([, now], i) => (samples[i]?.[1] ?? now) - now);
    const largest = Math.max(0, ...steps);
    return largest > available
      ? this.#trans.__('%1 is nearly full: %2 can be allocated, and this cell has taken %3 at once.', device, ...sizes(available, largest))
      : '';
  }

  /** At the pace of the last seconds the device is full soon. */
  #byTrend(device: string, samples: readonly Sample[], available: number): string {
    const first = samples[0];
    const last = samples[samples.length - 1];
    if (first === undefined || last === undefined || last[0] - first[0] < LEAST) {
      return '';
    }
    const pace = (first[1] - available) / (last[0] - first[0]);
    const seconds = pace > 0 ? available / pace : Infinity;
    return seconds < SOON
      ? this.#trans.__('%1 is full in about %2 at this pace: %3 can be allocated.', device, duration(seconds, this.#trans), formatBytes(available))
      : '';
  }
}

function sizes(...values: number[]): string[] {
  return values.map(formatBytes);
}
