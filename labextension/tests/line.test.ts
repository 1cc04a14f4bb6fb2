// @vitest-environment jsdom

import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { asOf } from '../src/view/as_of';
import { type Frame, frameOf, placedCells, placedEpochs, roundTop, stepPath } from '../src/view/line_drawing';
import { csvOf, svgOf } from '../src/view/line_export';
import { append, cellAt, pointAt } from '../src/view/line_points';
import { isTimeMark, type LineHistory, type LinePoint, type TimeMark } from '../src/view/protocol';
import { english } from '../src/view/words';
import { FakeModel, scene, type Scene } from './model';
import { control, isShown, open } from './page';

vi.setConfig({ testTimeout: 30_000 });

const GIB = 1024 ** 3;

function point(since: number, until: number, allocated: number, low = allocated, high = allocated): LinePoint {
  return [since, until, low, high, allocated, 2 * allocated, 7, 100 - allocated];
}

function cellMark(cell: number, t: number, end: number | null): TimeMark {
  const mark = { kind: 'cell', label: `In[${String(cell)}]`, t, end, cell, epoch: null, cell_id: '', peaks: [], device: '', nbytes: 0 };
  return isTimeMark(mark) ? mark : never();
}

function epochMark(epoch: number, t: number, end: number | null): TimeMark {
  return { ...cellMark(0, t, end), kind: 'epoch', label: `epoch ${String(epoch)}`, cell: null, epoch };
}

function never(): never {
  throw new Error('not a mark');
}

describe('the path', () => {
  const frame: Frame = { start: 0, end: 100, top: 10 };

  it('goes in steps: flat up to a change, upright at it', () => {
    const { line } = stepPath([point(0, 30, 2), point(40, 100, 6)], frame);
    expect(line).toBe('M0.0,80.0V80.0H300.0H400.0V40.0H1000.0');
    expect(line).not.toContain('L');
  });

  it('has the extremes of every stretch: a spike between two readings is drawn', () => {
    const { line } = stepPath([point(0, 30, 2), point(31, 31, 2, 1, 9), point(40, 100, 2)], frame);
    expect(line).toContain('H310.0V10.0V90.0V80.0');
  });

  it('is broken where nobody looked', () => {
    const { line, area } = stepPath([point(0, 30, 2), point(60, 100, 2)], frame);
    expect(line.match(/M/g)).toHaveLength(2);
    expect(line).toContain('H300.0M600.0');
    expect(area).toContain('H300.0V100H0.0Z');
  });

  it('begins at the left edge with what was in force there', () => {
    expect(stepPath([point(-50, 30, 2), point(31, 100, 3)], frame).line).toMatch(/^M0\.0,80\.0/);
  });

  it('shows the span that is asked for, and a round scale', () => {
    const points = [point(0, 500, 2), point(501, 1000, 6)];
    expect(frameOf(points, 60)).toMatchObject({ start: 940, end: 1000 });
    expect(frameOf(points, 600)).toMatchObject({ start: 400 });
    expect(frameOf(points, 0)).toMatchObject({ start: 0 });
    expect(frameOf([point(3, 3, 1)], 0)).toBeNull();
    expect([7.23 * GIB, 1.2 * GIB, 3 * GIB, 700 * 1024 ** 2].map(roundTop)).toEqual([8, 1.5, 3, 800 / 1024].map(n => n * GIB));
  });
});

describe('marks', () => {
  const frame: Frame = { start: 100, end: 200, top: 10 };

  it('keep a cell that began before the picture, at its left edge and inside of it', () => {
    const [first, second] = placedCells([cellMark(2, 20, 90), cellMark(3, 90, 150), cellMark(4, 150, null)], frame);
    expect(first).toMatchObject({ mark: { cell: 3 }, left: 0, width: 0.5 });
    expect(second).toMatchObject({ mark: { cell: 4 }, left: 0.5, width: 0.5 });
  });

  it('thin epochs by their number, and end with them: no epoch goes on after its fit', () => {
    const epochs = Array.from({ length: 57 }, (_, i) => epochMark(i + 1, 100 + i, 101 + i));
    const shown = placedEpochs(epochs, frame);
    expect(shown.map(({ mark }) => mark.epoch)).toEqual([20, 40]);
    const later: Frame = { start: 100, end: 201, top: 10 };
    expect(placedEpochs(epochs, later).map(({ mark }) => mark.epoch)).toEqual([20, 40]);
    const [only] = placedEpochs([epochMark(1, 100, 130)], frame);
    expect(only?.width).toBeCloseTo(0.3);
  });

  it('stay where a long fit has many epochs', () => {
    const marks = [cellMark(7, 100, 105), ...Array.from({ length: 90 }, (_, i) => epochMark(i, 106 + i, 107 + i))];
    expect(placedCells(marks, frame)).toHaveLength(1);
  });
});

describe('readings', () => {
  it('that are equal make one point longer, others a new one', () => {
    const points = [point(0, 1, 5)];
    append(points, point(2, 2, 5));
    append(points, point(3, 3, 6));
    append(points, point(30, 30, 6));
    expect(points.map(([since, until]) => [since, until])).toEqual([
      [0, 2],
      [3, 3],
      [30, 30]
    ]);
  });

  it('are found by their time; none where nobody looked, no cell where none ran', () => {
    const points = [point(0, 10, 5), point(100, 110, 6)];
    expect(pointAt(points, 5)?.allocated).toBe(5);
    expect(pointAt(points, 15)?.allocated).toBe(5);
    expect(pointAt(points, 50)).toBeNull();
    expect(pointAt(points, -1)).toBeNull();
    const marks = [cellMark(3, 0, 10), epochMark(1, 2, 3), cellMark(4, 20, null)];
    expect([5, 15, 25].map(t => cellAt(marks, t)?.cell ?? null)).toEqual([3, null, 4]);
  });

  it('are written as a table in bytes', () => {
    const rows = csvOf([point(0, 10, 5), point(20, 30, 6, 1, 9)], [cellMark(3, 0, 10)]).split('\n');
    expect(rows).toEqual([
      'time,cell,allocated,reserved,used by others,free,least allocated,most allocated',
      '1970-01-01T00:00:00.000Z,3,5,10,7,95,5,5',
      '1970-01-01T00:00:10.000Z,3,5,10,7,95,5,5',
      '1970-01-01T00:00:30.000Z,,6,12,7,94,1,9',
      ''
    ]);
  });

  it('say in the table which cell ran between two readings', () => {
    const points = [point(0, 10, 5), point(10.25, 20, 6)];
    const cells = (marks: TimeMark[]): string[] => csvOf(points, marks).split('\n').slice(1, 5).map(row => row.split(',')[1] ?? '');
    expect(cells([cellMark(3, 10.1, 10.2)])).toEqual(['', '', '3', '']);
    expect(cells([cellMark(3, 9, 10)])).toEqual(['', '3', '', '']);
    expect(cells([cellMark(3, -5, -1)])).toEqual(['', '', '', '']);
  });

  it('are drawn for themselves, with every name as text', () => {
    const frame: Frame = { start: 0, end: 100, top: 10 };
    const marks = [{ ...cellMark(3, 0, 50), label: '<script>' }];
    const svg = svgOf('a "device" & <b>', 'cuda:0', [point(0, 100, 5)], marks, frame, { line: 'red', text: 'black', background: 'white' });
    const picture = new DOMParser().parseFromString(svg, 'image/svg+xml');
    expect(picture.querySelector('parsererror, script, b')).toBeNull();
    expect(picture.documentElement.textContent).toContain('a "device" & <b>');
    expect(picture.documentElement.textContent).toContain('<script>');
  });
});

describe('the date of figures', () => {
  it('is the last cell after which they hold, the cell in the middle of which they are, or a time', () => {
    const { tick, heap } = scene('idle');
    const words = (state: object, of: object = {}): string => asOf({ ...heap, ...state }, { ...tick, ...of }, english);
    expect(words({ cell: 3 }, { heap_cell: null })).toBe('after In[3]');
    expect(words({ cell: 3 }, { heap_cell: 7 })).toBe('after In[7]');
    expect(words({ cell: 3 }, { heap_cell: 7, heap: 99 })).toBe('after In[3]');
    expect(words({ cell: 10, during: 11 }, { heap_cell: 10 })).toBe('during In[11]');
    expect(words({ cell: null }, { heap_cell: null })).toMatch(/^as of \d\d:\d\d:\d\d$/);
  });
});

describe('the chart', () => {
  let model: FakeModel;
  let root: HTMLElement;
  let close: () => void;
  const goToCell = vi.fn((cell: number) => cell === 15);

  function show(name: Scene = 'training', host: object = { goToCell }): LineHistory {
    const { history, ...state } = scene(name);
    model = new FakeModel(state);
    ({ root, close } = open(model, host));
    return history;
  }

  function filled(name: Scene = 'training', host: object = { goToCell }): LineHistory {
    const history = show(name, host);
    model.say('history', { op: 'history', history });
    return history;
  }

  const path = (): string => root.querySelector('.nbguard-chart-path')?.getAttribute('d') ?? '';
  const labels = (): string[] => [...root.querySelectorAll('.nbguard-mark-label')].map(node => node.textContent);
  const area = (): HTMLElement => root.querySelector<HTMLElement>('[role=application]') ?? root;
  const press = (key: string): void => {
    area().dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  };
  const spoken = (): string => root.querySelector('.nbguard-spoken[role=status]')?.textContent ?? '';

  beforeEach(() => {
    vi.useFakeTimers();
    goToCell.mockClear();
  });

  afterEach(() => {
    close();
    vi.useRealTimers();
  });

  it('asks for the history once, and goes on by the ticks', () => {
    const history = filled();
    expect(model.all('history')).toEqual([{ op: 'history', rid: expect.any(String) as string, seconds: 600 }]);
    const before = path();
    expect(before).toContain('H');
    const { tick } = scene('training');
    const last = history.lines[0]?.points.at(-1) ?? point(0, 0, 0);
    for (let n = 1; n <= 40; n++) {
      const line = [last[1] + n, last[1] + n, ...last.slice(2, 4), last[4] + n, ...last.slice(5)];
      model.set({ tick: { ...tick, n: tick.n + n, t: tick.t + n, devices: tick.devices.map(each => ({ ...each, line })) } });
    }
    expect(model.all('history')).toHaveLength(1);
    expect(path().length).toBeGreaterThan(before.length);
  });

  it('asks again when ticks were missed, and when the kernel is another', () => {
    filled();
    const { tick } = scene('training');
    model.set({ tick: { ...tick, n: tick.n + 5 } });
    expect(model.all('history')).toHaveLength(2);
    model.set({ tick: { ...tick, boot: 'another', n: 1 } });
    expect(model.all('history')).toHaveLength(3);
  });

  it('asks again when a device is used for the first time: the cell that did began before the first reading', () => {
    const { tick, history } = scene('training');
    const unused = tick.devices.map(each => ({ ...each, line: null }));
    model = new FakeModel({ tick: { ...tick, devices: unused }, heap: {} });
    ({ root, close } = open(model, { goToCell }));
    model.say('history', { op: 'history', history: { ...history, lines: [] } });
    expect(model.all('history')).toHaveLength(1);
    model.set({ tick: { ...tick, n: tick.n + 1 } });
    expect(model.all('history')).toHaveLength(2);
  });

  it('shows another span on request', () => {
    filled();
    const choice = root.querySelector<HTMLSelectElement>('select[aria-label="Time shown"]');
    expect([...(choice?.options ?? [])].map(option => option.text)).toEqual(['1 min', '10 min', 'all']);
    if (choice) {
      choice.value = '60';
      choice.dispatchEvent(new Event('change'));
    }
    expect(model.last('history')).toMatchObject({ seconds: 60 });
  });

  it('has a scale with units, times, cells and the epoch of the fit', () => {
    filled();
    const { tick } = scene('training');
    const most = tick.devices[0]?.line?.[3] ?? 0;
    expect(most / GIB).toBeGreaterThan(10);
    expect([...root.querySelectorAll('.nbguard-chart-scale span')].map(node => node.textContent)).toEqual(['15 GiB', '7.5 GiB']);
    const times = [...root.querySelectorAll('.nbguard-chart-times span')].map(node => node.textContent);
    expect(times).toHaveLength(3);
    times.forEach(words => { expect(words).toMatch(/^\d\d:\d\d:\d\d$/); });
    expect(labels().sort()).toEqual(['In[12]', 'In[15]', 'epoch 2']);
  });

  it('says the peak of each cell, and whether it is exact', () => {
    const history = show();
    const marks = history.marks.map((mark, i) => ({
      ...mark,
      peaks: mark.kind === 'cell' ? ([['cuda:0', 3 * GIB, i === 0]] as [string, number, boolean][]) : []
    }));
    const { tick } = scene('training');
    model.say('history', { op: 'history', history: { ...history, marks } });
    model.set({ tick: { ...tick, n: tick.n + 1, marks: [] } });
    const titles = [...root.querySelectorAll('.nbguard-mark-peak')].map(node => node.getAttribute('title'));
    expect(titles).toContain('In[12] · peak 3 GiB');
    expect(titles).toContain('In[15] · peak at least 3 GiB');
  });

  it('goes to a cell by its mark; where the host has no cells, a mark is no button', () => {
    filled();
    control(root, 'Go to In[15]').click();
    expect(goToCell).toHaveBeenLastCalledWith(15, 'cell-15');
    control(root, 'Go to In[12]').click();
    expect(spoken()).toBe('In[12] is no longer in the notebook.');
    close();
    filled('training', {});
    expect(root.querySelectorAll('button.nbguard-mark-label')).toHaveLength(0);
    expect(labels()).toContain('In[15]');
  });

  it('moves a cursor by keys and says the value there; a tick says nothing', () => {
    filled();
    const { tick } = scene('training');
    expect(spoken()).toBe('');
    press('End');
    expect(spoken()).toMatch(/^\d\d:\d\d:\d\d · In\[15\] · 10\.4 GiB allocated, [\d.]+ GiB reserved$/);
    press('ArrowLeft');
    press('ArrowLeft');
    press('ArrowLeft');
    const before = spoken();
    expect(before).toContain('GiB allocated');
    expect(before).not.toContain('10.4 GiB');
    model.set({ tick: { ...tick, n: tick.n + 1, t: tick.t + 1 } });
    expect(spoken()).toBe(before);
    press('PageUp');
    press('Enter');
    expect(goToCell).toHaveBeenCalledTimes(1);
    const cursor = root.querySelector<HTMLElement>('.nbguard-chart-cursor') ?? root;
    expect(isShown(cursor)).toBe(true);
    press('Escape');
    expect(isShown(cursor)).toBe(false);
  });

  it('shows a failed request as a mark of its own', () => {
    const history = show();
    const request = { ...cellMark(15, history.lines[0]?.points.at(-1)?.[0] ?? 0, null), kind: 'request', label: '6 GiB asked' };
    const marks = [...history.marks, { ...request, end: request.t, device: 'cuda:0', nbytes: 6 * GIB } as TimeMark];
    model.say('history', { op: 'history', history: { ...history, marks } });
    expect(labels()).toContain('6 GiB asked');
    expect(root.querySelectorAll('.nbguard-mark-request')).toHaveLength(1);
  });

  it('says what fits now only where it is known now', () => {
    filled();
    const { tick } = scene('training');
    expect(root.textContent).toContain('Largest request that fitted then: ');
    const fitting = (n: number, fits: unknown): object => ({
      ...tick,
      n: tick.n + n,
      devices: tick.devices.map(device => ({ ...device, fits }))
    });
    model.set({ tick: fitting(1, [3 * GIB, 4 * GIB]) });
    expect(root.textContent).toContain('Largest request that fits now: 3 GiB');
    expect(root.textContent).toContain('4 GiB after Empty cache.');
    model.set({ tick: fitting(2, null) });
    expect(root.textContent).not.toContain('fits now');
  });
});
