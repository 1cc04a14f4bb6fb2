/** Bytes to three digits, as people read them and as `nbguard/units.py` writes them. */

const KIB = 1024;
const UNITS: readonly (readonly [number, string])[] = [
  [KIB ** 4, 'TiB'],
  [KIB ** 3, 'GiB'],
  [KIB ** 2, 'MiB'],
  [KIB, 'KiB']
];
/** What rounds to 1000 of a unit reads better in the next one: `1 MiB`, not `1023 KiB`. */
const THOUSAND_AS_SHOWN = 999.5;

export type Unit = readonly [size: number, name: string];

/** Bytes per unit and its name, with three digits at most before the point; bytes themselves are exact up to `1023 B`. */
export function unitOf(nbytes: number): Unit {
  return UNITS.find(([size]) => nbytes >= size || (size > KIB && nbytes >= (THOUSAND_AS_SHOWN * size) / KIB)) ?? [1, 'B'];
}

/** `nbytes` to three digits with its unit, such as `3.05 GiB`, `64 MiB` or `512 B`; an unknown amount is `?`. */
export function formatBytes(nbytes: number | null): string {
  if (nbytes === null) {
    return '?';
  }
  const [size, name] = unitOf(Math.abs(nbytes));
  return `${size === 1 ? String(nbytes) : number(hundredthsOf(nbytes, size), nbytes)} ${name}`;
}

/**
 * `values` with one unit (that of the largest, if not given), each to three digits. Added up and rounded to the last digit of
 * the total, the figures give the total. What is there, but too little for the unit, is `<0.01`.
 */
export function formatColumn(values: readonly number[], unit: Unit = unitOf(Math.max(0, ...values))): string[] {
  const [size, name] = unit;
  if (size === 1) {
    return values.map(value => `${value} ${name}`);
  }
  return reAdding(values, size).map((hundredths, i) => `${number(hundredths, values[i] ?? 0)} ${name}`);
}

/** The last digit that is shown of `nbytes`, the third one or the second decimal, in hundredths of the unit. */
function stepOf(nbytes: number, size: number): number {
  const whole = Math.abs(nbytes) / size;
  return whole >= 100 ? 100 : whole >= 10 ? 10 : 1;
}

/** `nbytes` in hundredths of a unit, rounded to the digits that are shown. */
function hundredthsOf(nbytes: number, size: number): number {
  const step = stepOf(nbytes, size);
  const rounded = Math.floor((Math.abs(nbytes) * 100) / (size * step) + 0.5) * step;
  return nbytes < 0 ? -rounded : rounded;
}

function number(hundredths: number, nbytes: number): string {
  return nbytes !== 0 && hundredths === 0 ? `${nbytes < 0 ? '-' : ''}<0.01` : String(hundredths / 100);
}

/** `values` in hundredths of `size`: where they add up to another total, those that lose least are rounded the other way. */
function reAdding(values: readonly number[], size: number): number[] {
  const total = sum(values);
  const shown = values.map(value => hundredthsOf(value, size));
  const lastDigit = Math.max(...[...values, total].map(value => stepOf(value, size)));
  let surplus = sum(shown) - hundredthsOf(total, size);
  const direction = 2 * surplus >= lastDigit ? 1 : 2 * surplus < -lastDigit ? -1 : 0;
  const roundedBy = values.map((value, i) => direction * ((shown[i] ?? 0) * size - 100 * value));
  const byError = values.map((_, i) => i).sort((a, b) => (roundedBy[b] ?? 0) - (roundedBy[a] ?? 0) || a - b);
  for (const i of byError) {
    if ((roundedBy[i] ?? 0) <= 0 || (2 * surplus >= -lastDigit && 2 * surplus < lastDigit)) {
      break;
    }
    const change = direction * stepOf(values[i] ?? 0, size);
    shown[i] = (shown[i] ?? 0) - change;
    surplus -= change;
  }
  return shown;
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
