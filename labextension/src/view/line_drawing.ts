/** A line as a picture: its path of steps, the ticks of its axes, the places of its marks. Nothing here touches the page. */

import { formatBytes, unitOf } from './bytes';
import { GAP, reading } from './line_points';
import type { LinePoint, TimeMark } from './protocol';

export const WIDTH = 1000;
export const HEIGHT = 100;

/** Share of the width that the label of an epoch needs. */
const ROOM = 0.18;
const STRIDES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

/** The time and the bytes that a picture shows. */
export interface Frame {
  start: number;
  end: number;
  /** Bytes at its top. */
  top: number;
}

export interface PlacedMark {
  mark: TimeMark;
  /** Where it begins and how much room it has, as shares of the width. */
  left: number;
  width: number;
}

/** What a picture of `points` shows: at most the last `span` seconds (0: all). Null: there is nothing to draw. */
export function frameOf(points: readonly LinePoint[], span: number): Frame | null {
  const first = points[0];
  const last = points[points.length - 1];
  if (first === undefined || last === undefined || last[1] <= first[0]) {
    return null;
  }
  const start = span === 0 ? first[0] : Math.max(first[0], last[1] - span);
  return { start, end: last[1], top: roundTop(Math.max(1, ...points.map(point => point[3]))) };
}

/** The least round number of bytes that is at least `nbytes`: 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten of its unit. */
export function roundTop(nbytes: number): number {
  const [unit] = unitOf(nbytes);
  const power = 10 ** Math.floor(Math.log10(nbytes / unit));
  const factor = [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find(each => each * power * unit >= nbytes) ?? 10;
  return factor * power * unit;
}

/** The line as an SVG path: flat between readings, upright where one differs, broken where nobody looked. */
export function stepPath(points: readonly LinePoint[], frame: Frame): { line: string; area: string } {
  const x = (t: number): string => (Math.min(1, Math.max(0, share(t, frame))) * WIDTH).toFixed(1);
  const y = (nbytes: number): string => (HEIGHT * (1 - nbytes / frame.top)).toFixed(1);
  const lines: string[] = [];
  const areas: string[] = [];
  let path = '';
  let begin = '';
  let last: LinePoint | null = null;
  const finish = (): void => {
    if (last !== null) {
      lines.push(path);
      areas.push(`${path}V${HEIGHT}H${begin}Z`);
    }
  };
  for (const point of points) {
    const { since, until, low, high, allocated } = reading(point);
    if (until < frame.start) {
      continue;
    }
    const at = x(since);
    if (last === null || since - last[1] > GAP) {
      finish();
      begin = at;
      path = `M${at},${y(allocated)}`;
    } else {
      path += `H${at}`;
    }
    const extremes = low === high ? [] : [high, low];
    path += [...extremes, allocated].map(nbytes => `V${y(nbytes)}`).join('');
    path += `H${until > since ? x(until) : String(Math.min(WIDTH, Number(at) + 0.5))}`;
    last = point;
  }
  finish();
  return { line: lines.join(''), area: areas.join('') };
}

/** Where a time is, as a share of the width. */
export function share(t: number, { start, end }: Frame): number {
  return (t - start) / (end - start);
}

/** `nbytes` for an axis: `4 GiB`, `1.5 GiB`. */
export function axisBytes(nbytes: number): string {
  return formatBytes(nbytes);
}

/** A time of day, as the clock of the reader's machine has it. */
export function clock(t: number, withSeconds: boolean): string {
  const date = new Date(t * 1000);
  const parts = [date.getHours(), date.getMinutes(), ...(withSeconds ? [date.getSeconds()] : [])];
  return parts.map(part => String(part).padStart(2, '0')).join(':');
}

/** The cells that reach into the frame, each with the room up to the next. */
export function placedCells(marks: readonly TimeMark[], frame: Frame): PlacedMark[] {
  return placed(
    marks.filter(mark => mark.kind === 'cell' && isWithin(mark, frame)),
    frame,
    false
  );
}

/** Epochs, so many that their labels have room: every 2nd, 5th, 10th … by its number, which stays the same as time goes on. */
export function placedEpochs(marks: readonly TimeMark[], frame: Frame): PlacedMark[] {
  const epochs = marks.filter(mark => mark.kind === 'epoch' && isWithin(mark, frame));
  const fits = (stride: number): boolean => {
    const chosen = every(epochs, stride);
    return chosen.every((mark, i) => share(chosen[i + 1]?.t ?? Infinity, frame) - share(mark.t, frame) >= ROOM);
  };
  const stride = STRIDES.find(fits);
  return stride === undefined ? [] : placed(every(epochs, stride), frame, true);
}

/** The requests for memory on a device that failed in the frame. */
export function placedRequests(marks: readonly TimeMark[], device: string, frame: Frame): PlacedMark[] {
  const here = marks.filter(mark => mark.kind === 'request' && isWithin(mark, frame));
  return placed(
    here.filter(mark => mark.device === '' || mark.device === device),
    frame,
    false
  );
}

function every(epochs: readonly TimeMark[], stride: number): TimeMark[] {
  return epochs.filter(({ epoch }) => (epoch ?? 0) % stride === 0);
}

function isWithin(mark: TimeMark, { start, end }: Frame): boolean {
  return mark.t <= end && (mark.end ?? end) >= start;
}

/** Marks in their places; `endsItself`: the room of one is its own time only, not the time up to the next. */
function placed(marks: readonly TimeMark[], frame: Frame, endsItself: boolean): PlacedMark[] {
  return marks.map((mark, i) => {
    const left = Math.max(0, share(mark.t, frame));
    const own = endsItself && mark.end !== null ? Math.max(mark.end, mark.t) : frame.end;
    const room = Math.max(share(own, frame), left + (endsItself ? ROOM : 0));
    const next = marks[i + 1];
    const right = Math.min(1, room, next === undefined ? 1 : Math.max(left, share(next.t, frame)));
    return { mark, left, width: right - left };
  });
}
