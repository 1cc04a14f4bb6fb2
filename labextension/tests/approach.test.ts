import { describe, expect, it } from 'vitest';

import { Approach } from '../src/view/approach';
import type { Tick, TimeMark } from '../src/view/protocol';
import { english } from '../src/view/words';
import { scene } from './model';

const GIB = 1024 ** 3;
const TOTAL = 8 * GIB;

/** A tick of a device of 8 GiB on which so much is free. */
function tick(t: number, free: number, more: Partial<Tick> = {}): Tick {
  const idle = scene('idle').tick;
  const parts = [
    { name: 'allocated', nbytes: TOTAL - free, note: '' },
    { name: 'free', nbytes: free, note: '' }
  ];
  const devices = idle.devices.slice(0, 1).map(device => ({ ...device, total: TOTAL, parts }));
  return { ...idle, t, busy: true, cell: 7, devices, ...more };
}

describe('a device that gets full', () => {
  it('is spoken of before it is full, once, in words that stay', () => {
    const approach = new Approach(english);
    const said = Array.from({ length: 120 }, (_, n) => approach.follow(tick(n / 4, 2.4 * GIB - (n / 4) * 0.06 * GIB)));
    const words = said.filter(text => text !== '');
    expect(words.length).toBeGreaterThan(10);
    expect(new Set(words).size).toBe(1);
    expect(words[0]).toMatch(/^cuda:0 is full in about \d+ s at this pace: 2 GiB can be allocated\.$/);
  });

  it('is spoken of when the largest step of the cell does not fit once more', () => {
    const approach = new Approach(english);
    expect(approach.follow(tick(0, 7 * GIB))).toBe('');
    expect(approach.follow(tick(0.25, 4.2 * GIB))).toBe('');
    expect(approach.follow(tick(0.5, 1.4 * GIB))).toContain('1.4 GiB can be allocated, and this cell has taken 2.8 GiB at once');
  });

  it('is not when it is full but goes no further, or much of it is free, or no cell runs', () => {
    const approach = new Approach(english);
    for (let n = 0; n < 200; n++) {
      expect(approach.follow(tick(n / 4, 0.5 * GIB))).toBe('');
      expect(approach.follow(tick(n / 4, 0.5 * GIB - n, { busy: false, cell: null }))).toBe('');
    }
    const growing = new Approach(english);
    for (let n = 0; n < 40; n++) {
      expect(growing.follow(tick(n / 4, 7 * GIB - n * 0.1 * GIB))).toBe('');
    }
  });

  it('is spoken of anew only at the next approach', () => {
    const approach = new Approach(english);
    approach.follow(tick(0, 4.4 * GIB));
    expect(approach.follow(tick(1, 1.2 * GIB))).not.toBe('');
    expect(approach.follow(tick(2, 1.5 * GIB))).not.toBe('');
    expect(approach.follow(tick(3, 5 * GIB))).toBe('');
    expect(approach.follow(tick(4, 1 * GIB))).not.toBe('');
    expect(approach.follow(tick(5, 1 * GIB, { busy: false, cell: null }))).toBe('');
  });

  it('counts what PyTorch keeps free as free', () => {
    const approach = new Approach(english);
    const ticks = Array.from({ length: 60 }, (_, n) => tick(n / 4, 2 * GIB - (n / 4) * 0.1 * GIB));
    const cached = ticks.map(each => ({
      ...each,
      devices: each.devices.map(device => ({
        ...device,
        parts: [...device.parts, { name: 'releasable', nbytes: 4 * GIB, note: '' }]
      }))
    }));
    expect(cached.map(each => approach.follow(each)).filter(text => text !== '')).toEqual([]);
  });

  it('is spoken of at once when the same cell reached more in its last run than can be allocated now, once', () => {
    const run = (cell: number, end: number | null, peak: number): TimeMark => ({
      kind: 'cell', label: `In[${String(cell)}]`, t: cell, end, cell, epoch: null, cell_id: 'fit', peaks: [['cuda:0', peak, true]],
      device: '', nbytes: 0
    });
    const marks = [run(5, 6, 6 * GIB), run(7, null, 1 * GIB)];
    const others = (t: number, more: Partial<Tick> = {}): Tick => {
      const one = tick(t, 4 * GIB, { marks, ...more });
      const parts = [{ name: 'allocated', nbytes: 1 * GIB, note: '' }, { name: 'others', nbytes: 3 * GIB, note: '' }, { name: 'free', nbytes: 4 * GIB, note: '' }];
      return { ...one, devices: one.devices.map(device => ({ ...device, parts: parts })) };
    };
    const approach = new Approach(english);
    const words = 'cuda:0 may not have room for this cell: it reached 6 GiB when it ran last, and 5 GiB can be allocated.';
    expect(approach.follow(others(0))).toBe(words);
    expect(approach.follow(others(1))).toBe(words);
    expect(approach.follow(others(2, { busy: false, cell: null }))).toBe('');

    const roomy = new Approach(english);
    expect(roomy.follow(tick(0, 7 * GIB, { marks }))).toBe('');
    const another = new Approach(english);
    expect(another.follow(others(0, { marks: marks.map(mark => ({ ...mark, cell_id: String(mark.cell) })) }))).toBe('');
  });
});
