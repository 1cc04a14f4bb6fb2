/** Bytes as people read them, as `nbguard/units.py` writes them. */

const KIB = 1024;
const UNITS: readonly (readonly [number, string])[] = [
  [KIB ** 3, 'GiB'],
  [KIB ** 2, 'MiB'],
  [KIB, 'KiB']
];

export type Unit = readonly [size: number, name: string];

/** Bytes per unit and its name: the largest unit of which there is one or more. */
export function unitOf(nbytes: number): Unit {
  return UNITS.find(([size]) => nbytes >= size) ?? [1, 'B'];
}

/** `nbytes` with its unit, such as `3.05 GiB` or `512 B`; an unknown amount is `?`. */
export function formatBytes(nbytes: number | null): string {
  if (nbytes === null) {
    return '?';
  }
  const [size, name] = unitOf(Math.abs(nbytes));
  return `${size === 1 ? String(nbytes) : (nbytes / size).toFixed(2)} ${name}`;
}

/**
 * `values` with one unit (that of the largest, if not given), rounded so that they add up to their rounded total. What is
 * there, but too little for the unit, is `<0.01`.
 */
export function formatColumn(values: readonly number[], unit: Unit = unitOf(Math.max(0, ...values))): string[] {
  const [size, name] = unit;
  if (size === 1) {
    return values.map(value => `${value} ${name}`);
  }
  return reAdding(values, size).map((hundredths, i) => {
    const isSmall = hundredths === 0 && (values[i] ?? 0) !== 0;
    return `${isSmall ? '<0.01' : (hundredths / 100).toFixed(2)} ${name}`;
  });
}

/** `values` in hundredths of `size`: each rounded down, then what is missing goes to the largest remainders, one each. */
function reAdding(values: readonly number[], size: number): number[] {
  const floors = values.map(value => Math.floor((value * 100) / size));
  const remainders = values.map(value => (value * 100) % size);
  const sum = values.reduce((total, value) => total + value, 0);
  const missing = Math.floor((sum * 200 + size) / (2 * size)) - floors.reduce((total, floor) => total + floor, 0);
  const byRemainder = values.map((_, i) => i).sort((a, b) => (remainders[b] ?? 0) - (remainders[a] ?? 0) || a - b);
  const roundedUp = new Set(byRemainder.slice(0, missing));
  return floors.map((floor, i) => floor + (roundedUp.has(i) ? 1 : 0));
}
