/** The lines of all devices over the time that is shown: the kernel's history of it, carried on by its ticks. */

import type { Connection } from './connection';
import { append } from './line_points';
import type { LineHistory, LinePoint, Tick, TimeMark } from './protocol';

/** Seconds that can be shown; 0: all that the kernel keeps. */
export const SPANS = [60, 600, 0] as const;
export type Span = (typeof SPANS)[number];

/** After so many readings the history is asked for again: it is thinner. */
const MOST = 80;
/** Milliseconds after which a history that has not come is asked for again. */
const PATIENCE = 15_000;
/** So many points of a device are held where no history comes. */
const LONGEST = 3000;

export class LineSource {
  span: Span = 600;
  marks: readonly TimeMark[] = [];
  #lines = new Map<string, LinePoint[]>();
  #boot = '';
  #n = 0;
  #added = 0;
  #isWanted = false;
  #askedAt = -Infinity;

  readonly #connection: Pick<Connection, 'ask'>;
  readonly #changed: () => void;

  constructor(
    connection: Pick<Connection, 'ask'>,
    changed: () => void
  ) {
    this.#connection = connection;
    this.#changed = changed;
  }

  /** The points of a device, oldest first. */
  of(device: string): readonly LinePoint[] {
    return this.#lines.get(device) ?? [];
  }

  /** Show another span of time. */
  show(span: Span): void {
    this.span = span;
    this.#isWanted = true;
    this.#askedAt = -Infinity;
    this.#ask();
    this.#changed();
  }

  /** Take the reading of a tick; where ticks were missed, and now and then, ask for the history. */
  follow(tick: Tick): void {
    if (tick.boot !== this.#boot) {
      this.#boot = tick.boot;
      this.#n = -1;
      this.#lines.clear();
      this.marks = [];
      this.#askedAt = -Infinity;
    }
    if (tick.n <= this.#n) {
      return;
    }
    this.#isWanted ||= tick.n !== this.#n + 1 || this.#added >= MOST;
    this.#n = tick.n;
    this.#added += 1;
    for (const { device, line } of tick.devices) {
      if (line !== null) {
        const known = this.#lines.get(device);
        this.#isWanted ||= known === undefined; // its history begins before this reading, with nothing in use
        const points = known ?? [];
        append(points, line);
        this.#lines.set(device, points);
      }
    }
    this.#take(tick.marks);
    this.#drop(tick.t);
    this.#ask();
  }

  #ask(): void {
    if (!this.#isWanted || this.#boot === '' || Date.now() - this.#askedAt < PATIENCE) {
      return;
    }
    this.#askedAt = Date.now();
    const [boot, span] = [this.#boot, this.span];
    this.#connection.ask({ op: 'history', seconds: span }, progress => {
      if (progress.op === 'refused' || progress.op === 'lost') {
        this.#askedAt = -Infinity;
      } else if (progress.op === 'history' && boot === this.#boot && span === this.span) {
        this.#fill(progress.history);
      }
    });
  }

  #fill(history: LineHistory): void {
    const before = this.#lines;
    this.#lines = new Map(history.lines.map(({ device, points }) => [device, [...points]]));
    for (const [device, points] of before) {
      const line = this.#lines.get(device) ?? [];
      const end = line[line.length - 1]?.[1] ?? -Infinity;
      for (const point of points.filter(([since]) => since > end)) {
        append(line, point);
      }
      this.#lines.set(device, line);
    }
    const newer = this.marks;
    this.marks = history.marks;
    this.#take(newer.filter(mark => !history.marks.some(other => key(other) === key(mark))));
    this.#added = Math.max(0, this.#n - history.n);
    this.#isWanted = false;
    this.#askedAt = -Infinity;
    this.#changed();
  }

  /** Take marks: new ones, and those that have ended since or risen. */
  #take(marks: readonly TimeMark[]): void {
    const known = new Map(this.marks.map(mark => [key(mark), mark]));
    for (const mark of marks) {
      known.set(key(mark), mark);
    }
    this.marks = [...known.values()].sort((a, b) => a.t - b.t);
  }

  /** Drop what is older than the span. */
  #drop(now: number): void {
    const since = this.span === 0 ? -Infinity : now - this.span;
    for (const points of this.#lines.values()) {
      const first = points.findIndex(point => point[1] >= since);
      const old = first < 0 ? points.length - 1 : first;
      points.splice(0, Math.max(0, old, points.length - LONGEST));
    }
    this.marks = this.marks.filter(mark => mark.end === null || mark.end >= since);
  }
}

function key(mark: TimeMark): string {
  return `${mark.kind} ${mark.cell ?? mark.epoch} ${mark.t}`;
}
