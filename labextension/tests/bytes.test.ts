import { describe, expect, it } from 'vitest';

import { formatBytes, formatColumn, unitOf } from '../src/view/bytes';

const KiB = 1024;
const MiB = 1024 * KiB;
const GiB = 1024 * MiB;

describe('bytes', () => {
  it.each([
    [0, '0 B'],
    [1, '1 B'],
    [1023, '1023 B'],
    [KiB, '1 KiB'],
    [1536 * KiB, '1.5 MiB'],
    [3 * GiB + 54 * MiB, '3.05 GiB'],
    [8 * MiB + 128 * KiB, '8.13 MiB'],
    [15 * MiB + 585 * KiB, '15.6 MiB'],
    [10 * MiB - 1, '10 MiB'],
    [100 * MiB - 1, '100 MiB'],
    [1000 * KiB, '0.98 MiB'],
    [1023 * KiB, '1 MiB'],
    [999 * MiB + 511 * KiB, '999 MiB'],
    [999 * MiB + 512 * KiB, '0.98 GiB'],
    [2048 * GiB, '2 TiB'],
    [-2 * MiB, '-2 MiB'],
    [null, '?']
  ])('%s reads %s, as nbguard/units.py writes it', (nbytes, text) => {
    expect(formatBytes(nbytes)).toBe(text);
  });

  it('has one unit in a column, and figures that re-add to the rounded total', () => {
    for (let seed = 1; seed < 300; seed++) {
      const values = Array.from({ length: (seed % 29) + 1 }, (_, i) => (seed * 7919 * (i + 1) * 104_729) % (200 * GiB));
      const [size, name] = unitOf(Math.max(...values));
      const figures = formatColumn(values);
      expect(figures.every(figure => figure.endsWith(` ${name}`))).toBe(true);
      if (size > 1) {
        const shown = figures.reduce((sum, figure) => sum + (figure.startsWith('<') ? 0 : Math.round(parseFloat(figure) * 100)), 0);
        const total = values.reduce((sum, value) => sum + value, 0);
        expect(formatColumn([Math.ceil((shown * size) / 100)], [size, name])).toEqual(formatColumn([total], [size, name]));
      }
    }
  });

  it('rounds as the table of %gpumem does', () => {
    expect(formatColumn([GiB, GiB / 3, GiB / 3, GiB / 3])).toEqual(['1 GiB', '0.34 GiB', '0.33 GiB', '0.33 GiB']);
    expect(formatColumn([8 * GiB, 4 * KiB, 0])).toEqual(['8 GiB', '<0.01 GiB', '0 GiB']);
    expect(formatColumn([100 * MiB + 400 * KiB, 100 * MiB + 400 * KiB, 6 * MiB])).toEqual(['101 MiB', '100 MiB', '6 MiB']);
    expect(formatColumn([512 * MiB, 15 * MiB + 585 * KiB, 410 * KiB])).toEqual(['512 MiB', '15.6 MiB', '0.4 MiB']);
    expect(formatColumn([5, 1000])).toEqual(['5 B', '1000 B']);
    expect(formatColumn([])).toEqual([]);
  });
});
