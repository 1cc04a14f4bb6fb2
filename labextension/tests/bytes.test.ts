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
    [KiB, '1.00 KiB'],
    [1536 * KiB, '1.50 MiB'],
    [3 * GiB + 54 * MiB, '3.05 GiB'],
    [-2 * MiB, '-2.00 MiB'],
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
        expect(shown).toBe(Math.floor((total * 200 + size) / (2 * size)));
      }
    }
  });

  it('rounds as the table of %gpumem does', () => {
    expect(formatColumn([GiB, GiB / 3, GiB / 3, GiB / 3])).toEqual(['1.00 GiB', '0.34 GiB', '0.33 GiB', '0.33 GiB']);
    expect(formatColumn([8 * GiB, 4 * KiB, 0])).toEqual(['8.00 GiB', '<0.01 GiB', '0.00 GiB']);
    expect(formatColumn([5, 1000])).toEqual(['5 B', '1000 B']);
    expect(formatColumn([])).toEqual([]);
  });
});
