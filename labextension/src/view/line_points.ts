/** The points of a device's line, and what they say of one moment. They come from a kernel's history and from its ticks. */

import type { LinePoint, TimeMark } from './protocol';

/** Seconds without a reading after which nothing is known of the time between. */
export const GAP = 12;

/** The fields of a point by their names. */
export interface Reading {
  since: number;
  until: number;
  low: number;
  high: number;
  allocated: number;
  reserved: number | null;
  others: number | null;
  free: number | null;
}

export function reading([since, until, low, high, allocated, reserved, others, free]: LinePoint): Reading {
  return { since, until, low, high, allocated, reserved, others, free };
}

/** Add a later reading to `points`: one that is equal to the last only makes that longer. */
export function append(points: LinePoint[], point: LinePoint): void {
  const last = points[points.length - 1];
  if (last !== undefined && isSame(last, point)) {
    points[points.length - 1] = [last[0], point[1], ...point.slice(2)] as unknown as LinePoint;
  } else {
    points.push(point);
  }
}

function isSame(last: LinePoint, point: LinePoint): boolean {
  const isFlat = last[2] === last[3];
  return isFlat && point[0] - last[1] <= GAP && last.slice(2).every((figure, i) => figure === point[i + 2]);
}

/** The point in force at the time `t`; null before the first, and where nobody looked. */
export function pointAt(points: readonly LinePoint[], t: number): Reading | null {
  for (let i = points.length - 1; i >= 0; i--) {
    const point = points[i];
    if (point !== undefined && point[0] <= t) {
      return t - point[1] <= GAP ? reading(point) : null;
    }
  }
  return null;
}

/** The cell that ran at the time `t`, or else the last that ran since the time `before`. */
export function cellAt(marks: readonly TimeMark[], t: number, before = t): TimeMark | null {
  for (let i = marks.length - 1; i >= 0; i--) {
    const mark = marks[i];
    if (mark?.kind === 'cell' && mark.t <= t) {
      return mark.end === null || mark.end >= t || mark.end > before ? mark : null;
    }
  }
  return null;
}
