// @vitest-environment jsdom

import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import type { HostState, LoadProblem } from '../src/view/host';
import { FakeModel, outcome, plan, scene, why, type Scene } from './model';
import { control, headings, isShown, open } from './page';

vi.setConfig({ testTimeout: 30_000 });

let model: FakeModel;
let root: HTMLElement;
let close: () => void;

function show(name: Scene = 'training'): void {
  model = new FakeModel(scene(name));
  ({ root, close } = open(model));
}

function askForPlan(): void {
  const clean = control(root, 'Clean stale');
  clean.focus();
  clean.click();
  model.say('plan', { op: 'ack' });
  model.say('plan', { op: 'plan', plan });
}

beforeEach(() => {
  vi.useFakeTimers();
});

afterEach(() => {
  close();
  vi.useRealTimers();
});

/** A figure and its unit. */
function read(node: Element | null): [number, string] {
  const [value = '', unit = ''] = (node?.textContent ?? '').split(' ');
  return [Number(value), unit];
}

/** Open the line that stands for all small holders. */
function openSmall(): void {
  const words = /\d+ small holders/.exec(root.textContent)?.[0] ?? '';
  control(root, `parts of ${words}`).click();
}

describe('what is shown', () => {
  it('has its sections under the names that others look for', () => {
    show();
    expect(root.getAttribute('role')).toBe('region');
    expect(root.getAttribute('aria-label')).toBe('GPU memory');
    expect(root.dataset.tick).toBe('960');
    expect(headings(root)).toEqual(['Fit', 'Held by', 'Findings', 'Fragmentation', 'History']);
    expect(root.textContent).toContain('learn.fit_one_cycle');
    expect(root.textContent).toContain('epoch 2 of 5 · batch 118 of 240 · loss 0.4120');
    const { tick } = scene('training');
    model.set({ tick: { ...tick, fit: { ...tick.fit, loss: -2.967 } } });
    expect(root.textContent).toContain('loss −2.967');
    expect(root.querySelector('.nbguard-status')?.textContent).toBe('training');
    expect(control(root, 'Clean stale · 3.67 GiB')).toBeTruthy();
    expect(control(root, 'why losses')).toBeTruthy();
  });

  it('shows no section of a look that has not come', () => {
    const { tick } = scene('idle');
    model = new FakeModel({ ...scene('idle'), heap: {} });
    ({ root, close } = open(model));
    model.set({ tick: { ...tick, n: 7 } });
    expect(root.dataset.tick).toBe('7');
    expect(headings(root)).toEqual([]);
    expect(root.textContent).not.toContain('Nothing');
  });

  it('does not say that nothing is held or stale before anybody has looked', () => {
    const training = scene('training');
    const unlooked = { boot: training.heap.boot, heap: 0, cell: null, stale: 0, holders: [], findings: [], experiments: [], devices: [] };
    model = new FakeModel({ ...training, heap: { ...training.heap, ...unlooked } });
    ({ root, close } = open(model));
    expect(root.querySelector('.nbguard-holders')?.textContent).toContain('Not looked at yet.');
    expect(root.textContent).not.toContain('Nothing');
    model.set({ heap: { ...training.heap, ...unlooked, heap: 1, cell: 3 } });
    expect(root.querySelector('.nbguard-holders')?.textContent).toContain('Nothing holds memory of a device.');
    expect(root.textContent).toContain('Nothing is stale');
    model.set({ tick: { ...training.tick, n: training.tick.n + 1, heap: 1, heap_cell: 3, cell: 6 } }); // In[4] and In[5] have ended
    expect(root.textContent).toContain('Nothing is known to be stale');
    model.set({ tick: { ...training.tick, n: training.tick.n + 2, heap: 1, heap_cell: 5, cell: 6 } });
    expect(root.textContent).toContain('Nothing is stale');
    model.set({ heap: { ...training.heap, ...unlooked, heap: 2, during: 4 } }); // what running code holds cannot be told from garbage
    expect(root.textContent).toContain('Nothing is known to be stale');
  });

  it('says what to do after running out of memory', () => {
    show('oom');
    expect(headings(root)).toContain('Out of memory');
    expect(root.querySelector('.nbguard-oom')?.textContent).toContain('It asked cuda:0 for 6 GiB');
    expect(root.querySelector('.nbguard-oom')?.textContent).toContain('+3.67 GiB');
  });

  it('shows names of any kind as text', () => {
    show('hostile');
    const label = scene('hostile').heap.holders[0]?.label;
    expect(root.textContent).toContain(label);
    expect(root.querySelectorAll('img, script, b[onclick]')).toHaveLength(0);
    for (const name of root.querySelectorAll<HTMLElement>('.nbguard-name')) {
      expect(name.dir).toBe('auto');
      expect(name.textContent.length).toBeLessThanOrEqual(201);
      expect(name.title.length).toBeLessThanOrEqual(501);
    }
  });

  it('lists a few of many, all of them on request, and those that match', () => {
    show('many');
    const rows = (): number => root.querySelectorAll('tbody').length;
    const { holders } = scene('many').heap;
    expect(rows()).toBe(10);
    control(root, 'show').click();
    expect(rows()).toBe(Math.min(110, holders.length));
    const filter = control(root, 'Filter') as HTMLInputElement;
    filter.value = holders[3]?.label ?? '';
    filter.dispatchEvent(new Event('input'));
    expect(rows()).toBeLessThan(10);
    expect(root.querySelector('tbody')?.textContent).toContain(holders[3]?.label);
    filter.value = 'no such name';
    filter.dispatchEvent(new Event('input'));
    expect(root.textContent).toContain('Nothing matches.');
  });

  it('has one list, whose rows add up to its total, in one unit', () => {
    for (const name of ['training', 'stale', 'oom', 'idle'] as const) {
      show(name);
      const figures = [...root.querySelectorAll('.nbguard-holders tbody > tr:first-child > .nbguard-figure')].map(read);
      const total = read(root.querySelector('.nbguard-holders tfoot .nbguard-figure'));
      expect(new Set([...figures, total].map(([, unit]) => unit)).size).toBe(1);
      expect(figures.reduce((sum, [value]) => sum + value, 0)).toBeCloseTo(total[0], total[0] < 10 ? 5 : 1); // to the last of three digits
      const allocated = scene(name).heap.holders.reduce((sum, row) => sum + row.nbytes, 0);
      expect(total[0]).toBeCloseTo(allocated / 1024 ** 3, total[0] < 10 ? 2 : 1);
      close();
    }
    show('training');
  });

  it('has the largest row first, be it of an experiment or of a name, and what is folded last', () => {
    show();
    const { heap } = scene('training');
    const size = 50 * 1024 ** 3;
    const loose = { ...heap.holders[2], id: 90, label: 'raw', path: 'raw', nbytes: size, frees: size, is_small: false };
    const frame = { ...loose, id: 91, label: 'running f()', path: 'running f()', is_running: true, nbytes: 60 * 1024 ** 3 };
    model.set({ heap: { ...heap, heap: 8, holders: [...heap.holders, frame, loose] } });
    const names = [...root.querySelectorAll('.nbguard-holders tbody > tr:first-child > th')].map(node => node.textContent);
    expect(names[0]).toContain('raw');
    expect(names[1]).toContain('learn');
    expect(names.slice(2).some(name => name.includes('frame'))).toBe(true);
    expect(names.at(-1)).toMatch(/frame|small/);
    expect(root.querySelector('th[aria-sort]')?.getAttribute('aria-sort')).toBe('descending');
  });

  it('unfolds an experiment into parts that add up to it', () => {
    show();
    expect(root.textContent).not.toContain('optimizer');
    const fold = control(root, 'parts of learn');
    fold.click();
    expect(fold.getAttribute('aria-expanded')).toBe('true');
    const body = fold.closest('tbody');
    const parts = [...(body?.querySelectorAll('.nbguard-part > .nbguard-figure') ?? [])].map(read);
    expect(body?.textContent).toContain('optimizer');
    expect(parts.reduce((sum, [value]) => sum + value, 0)).toBeCloseTo(4.1, 5);
    fold.click();
    expect(root.textContent).not.toContain('optimizer');
  });

  it('has a row for what is shared, with the bytes that go with all of its holders', () => {
    show('idle');
    const { heap } = scene('idle');
    const shared = { ...heap.holders[0], id: 90, label: 'learn + losses', path: '', kind: 'shared', parts: [], can: ['release'] };
    const more = { together: ['learn', 'losses'], frees: 5 * 1024 ** 3, is_small: false };
    const row = { ...shared, ...more, nbytes: 1024 ** 3 };
    model.set({ heap: { ...heap, heap: 8, holders: [row, ...heap.holders] } });
    const body = control(root, 'release… learn + losses').closest('tbody');
    expect(body?.querySelector('.nbguard-figure')?.textContent).toBe('1 GiB');
    expect(body?.textContent).toContain('with learn, losses: 5 GiB');
    expect(control(root, 'parts of learn').closest('tbody')?.querySelector('.nbguard-figure')?.textContent).toBe('4.1 GiB');
  });

  it('folds frames of the running cell, and small holders', () => {
    show('idle');
    const { heap } = scene('idle');
    const like = (id: number, label: string, more: object): object => ({ ...heap.holders[2], id, label, path: label, ...more });
    const note = 'in use by running code: freed when that ends';
    const frames = [1, 2, 3].map(n => like(90 + n, `running f${String(n)}()`, { is_running: true, note, nbytes: 1024 ** 3 }));
    const zeros = [1, 2].map(n => like(95 + n, `alias${String(n)}`, { nbytes: 0, frees: 0, is_small: true }));
    model.set({ heap: { ...heap, heap: 8, holders: [...heap.holders, ...frames, ...zeros] } });
    expect(root.textContent).toContain('3 frames of the running cell');
    expect(root.textContent).toMatch(/\d small holders/);
    expect(root.textContent).not.toContain('running f1()');
    control(root, 'parts of 3 frames').click();
    expect(root.textContent).toContain('running f1()');
    expect(root.textContent).toContain(note);
    openSmall();
    expect(control(root, 'release… alias1')).toBeTruthy();
  });

  it('marks rows of as many bytes as Clean stale promises', () => {
    show('idle');
    const { heap } = scene('idle');
    const stale = Math.round(48.89 * 1024 ** 2);
    const holders = heap.holders.map(row => (row.label === 'learn' ? { ...row, stale_bytes: stale } : row));
    model.set({ heap: { ...heap, heap: 8, stale, holders } });
    expect(control(root, 'Clean stale · 48.9 MiB')).toBeTruthy();
    const chips = [...root.querySelectorAll('.nbguard-holders .nbguard-chip')].filter(isShown).map(node => node.textContent);
    expect(chips).toEqual(['48.9 MiB stale']);
  });

  it('says "at least" where not all was looked into', () => {
    show('idle');
    const { heap } = scene('idle');
    model.set({ heap: { ...heap, heap: 8, holders: heap.holders.map(row => ({ ...row, at_least: row.label === 'preds' })) } });
    const row = control(root, 'why preds').closest('tbody');
    expect(row?.querySelector('.nbguard-figure')?.textContent).toBe('≥ 0.63 GiB');
    expect(row?.textContent).toContain('at least');
  });

  it('offers what frees a row that is no name: the last error, and cycles', () => {
    show('stale');
    openSmall();
    control(root, 'clean… last error').click();
    expect(model.last('plan')).toMatchObject({ action: 'clean_stale' });
    expect(control(root, 'why last error')).toBeTruthy();
    expect(control(root, 'clean… unreachable cycles')).toBeTruthy();
  });

  it('goes to the cell that made a holder, where the host has cells', () => {
    show();
    expect(() => control(root, 'go to')).toThrow();
    close();
    const gone: number[] = [];
    model = new FakeModel(scene('training'));
    ({ root, close } = open(model, { goToCell: cell => gone.push(cell) < 2 }));
    const link = control(root, 'go to In[13], which made losses');
    link.click();
    expect(gone).toEqual([13]);
    link.click();
    expect(link.title).toBe('In[13] is not in the notebook any more');
  });

  it('names the notebook, also after a rename, in a header of one height', () => {
    show();
    expect(root.querySelector('h2')?.textContent).toBe('GPU memory');
    close();
    model = new FakeModel({ ...scene('training'), notebook: 'a.ipynb' });
    ({ root, close } = open(model));
    expect(root.querySelector('h2')?.textContent).toBe('a.ipynb');
    model.set({ notebook: 'a_renamed.ipynb' });
    expect(root.querySelector('h2')?.textContent).toBe('a_renamed.ipynb');
  });

  it('calls other notebooks of the device by name, and guesses at nobody', () => {
    show('idle');
    const { tick } = scene('idle');
    const neighbours = [['cuda:0', 'k2', '', 1.76 * 1024 ** 3], ['cuda:0', '', '', 1024 ** 3], ['cuda:0', 'k9', '', 1024 ** 3]];
    model.set({ tick: { ...tick, neighbours } });
    expect(root.textContent).not.toContain('b.ipynb');
    close();
    model = new FakeModel({ tick: { ...tick, neighbours }, heap: {} });
    ({ root, close } = open(model, { nameOf: kernel => (kernel === 'k2' ? 'b.ipynb' : null) }));
    expect(root.textContent).toContain('Other notebooks: b.ipynb 1.76 GiB, 2 other processes 2 GiB');
    close();
    let shown = '';
    const others = [{ kernel: 'k3', name: 'c.ipynb', nbytes: 170 * 1024 ** 2 }, { kernel: 'k2', name: 'b.ipynb', nbytes: 5 }];
    const goToNotebook = (kernel: string): void => { shown = kernel; };
    ({ root, close } = open(model, { nameOf: kernel => (kernel === 'k2' ? 'b.ipynb' : null), others: () => others, goToNotebook }));
    expect(root.textContent).toContain('Other notebooks: b.ipynb 1.76 GiB, c.ipynb 170 MiB, 2 other processes 2 GiB');
    control(root, 'go to c.ipynb').click();
    expect(shown).toBe('k3');
    close();
    const told = [['cuda:0', 'k2', 'old.ipynb', 5], ['cuda:0', 'k9', 'd.ipynb', 1024 ** 3], ['cuda:0', '', 'train.py', 7], ['cuda:0', '', '', 9]];
    model = new FakeModel({ tick: { ...tick, neighbours: told }, heap: {} });
    close();
    ({ root, close } = open(model, { nameOf: kernel => (kernel === 'k2' ? 'b.ipynb' : null), others: () => others, goToNotebook }));
    expect(root.textContent).toContain('Other notebooks: d.ipynb 1 GiB, c.ipynb 170 MiB, b.ipynb 5 B, train.py 7 B, 1 other process 9 B');
    expect(() => control(root, 'go to d.ipynb')).toThrow();
    expect(control(root, 'go to b.ipynb')).toBeTruthy();
    close();
    ({ root, close } = open(model, { nameOf: kernel => (kernel === 'k2' ? 'b.ipynb' : null) }));
    model.set({ tick: { ...tick, neighbours: [] } });
    expect([...root.querySelectorAll('.nbguard-neighbours')].filter(isShown)).toHaveLength(0);
  });

  it('never says of a Learner that trains what holds of an idle one', () => {
    show('idle');
    const { tick, heap } = scene('idle');
    const sentence = 'learn keeps its gradients between fits';
    model.set({ heap: { ...heap, heap: 8, findings: [[sentence, 'learn.model.zero_grad()', 'learn', 'k1', null]] } });
    expect(root.textContent).toContain(sentence);
    model.set({ tick: { ...tick, fit: scene('training').tick.fit } });
    expect(root.textContent).not.toContain(sentence);
    model.set({ tick });
    expect(root.textContent).toContain(sentence);
  });

  it('tells how a training went on where memory ran out, also once it is over', () => {
    show();
    const { tick } = scene('training');
    const section = (): HTMLElement | null | undefined => root.querySelector('[role=progressbar]')?.closest('section');
    const survived = ['batch 7: out of memory; it runs in 2 pieces', 'batch 9: out of memory, and `BatchNorm1d` forbids it'];
    model.set({ tick: { ...tick, survived } });
    expect(section()?.textContent).toContain('Batch 7: out of memory; it runs in 2 pieces.Batch 9: out of memory, and BatchNorm1d forbids it.');
    expect(section()?.textContent).toContain('learn.fit_one_cycle');
    model.set({ tick: { ...tick, fit: null, survived } });
    expect(headings(root)).toContain('Fit');
    expect(root.querySelector('[role=progressbar]')?.closest('[hidden]')).not.toBeNull();
    model.set({ tick: { ...tick, fit: null, survived: [] } });
    expect(headings(root)).not.toContain('Fit');
  });

  it('tells a screen reader how far the fit is', () => {
    show();
    const bar = root.querySelector('[role=progressbar]');
    expect(bar?.getAttribute('aria-valuenow')).toBe('30');
    expect(bar?.getAttribute('aria-label')).toBeTruthy();
  });

  it('empties the cache only where PyTorch keeps some', () => {
    show('idle');
    const { tick } = scene('idle');
    expect(control(root, 'Empty cache').getAttribute('aria-disabled')).toBeNull();
    const parts = [{ name: 'process', nbytes: 5, note: '' }];
    model.set({ tick: { ...tick, tracked: 'cpu', devices: tick.devices.map(device => ({ ...device, total: null, parts })) } });
    expect(() => control(root, 'Empty cache')).toThrow();
  });

  it('sorts by name, cell and bytes, and the other way round', () => {
    show();
    const names = (): string[] => [...root.querySelectorAll('tbody th')].map(node => node.textContent);
    const byBytes = names();
    expect(root.querySelector('table')?.firstElementChild?.tagName).toBe('THEAD');
    control(root, 'Name').click();
    expect(names()).toEqual([...byBytes].sort((a, b) => a.localeCompare(b)));
    expect(root.querySelector('th[aria-sort]')?.getAttribute('aria-sort')).toBe('ascending');
    control(root, 'Name').click();
    expect(names()).toEqual([...byBytes].sort((a, b) => b.localeCompare(a)));
    expect(root.querySelector('th[aria-sort]')?.getAttribute('aria-sort')).toBe('descending');
    control(root, 'Cell').click();
    expect(names()[0]).toBe('learn');
  });
});

describe('ticks', () => {
  it('change texts in place and add nothing, however many come', () => {
    show();
    const nodes = (): Node[] => [...root.querySelectorAll('*')];
    const before = nodes();
    const { tick } = scene('training');
    for (let n = 1; n <= 600; n++) {
      const parts = (tick.devices[0]?.parts ?? []).map(part => ({ ...part, nbytes: part.nbytes + n }));
      const devices = tick.devices.map(device => ({ ...device, parts }));
      model.set({ tick: { ...tick, n: tick.n + n, devices, fit: tick.fit && { ...tick.fit, batch: (n % 239) + 1 } } });
    }
    expect(root.dataset.tick).toBe('1560');
    expect(root.textContent).toContain('batch 123 of 240');
    expect(nodes()).toEqual(before);
  });

  it('are not read out: pictures get a new label every 10 s, and only results are live', () => {
    show();
    const bar = root.querySelector('.nbguard-bar');
    const { tick } = scene('training');
    const label = bar?.getAttribute('aria-label');
    expect(label).toContain('allocated 10.4 GiB');
    const devices = tick.devices.map(device => ({ ...device, parts: [{ name: 'allocated', nbytes: 1, note: '' }] }));
    model.set({ tick: { ...tick, devices } });
    expect(bar?.getAttribute('aria-label')).toBe(label);
    vi.advanceTimersByTime(10_000);
    model.set({ tick: { ...tick, devices } });
    expect(bar?.getAttribute('aria-label')).not.toBe(label);
    const live = [...root.querySelectorAll('[aria-live], [role=status], [role=alert]')];
    expect(live.map(node => node.className)).toEqual(['nbguard-spoken', 'nbguard-result']); // values at the line's cursor
    expect(live[0]?.textContent).toBe('');
  });

  it('keep a part of the bar that comes and goes', () => {
    show();
    const { tick } = scene('training');
    const lines = root.querySelectorAll('.nbguard-key li').length;
    const devices = tick.devices.map(device => {
      const parts = device.parts.filter(part => part.name !== 'stranded');
      return { ...device, parts: parts.map(part => (part.name === 'releasable' ? { ...part, nbytes: 0 } : part)) };
    });
    model.set({ tick: { ...tick, devices } });
    expect(root.querySelectorAll('.nbguard-key li')).toHaveLength(lines);
    model.set({ tick: { ...tick, boot: 'another', devices } });
    expect(root.querySelectorAll('.nbguard-key li')).toHaveLength(lines - 2);
  });

  it('say which experiment trains before a heap does', () => {
    show('idle');
    const chip = root.querySelector('.nbguard-holders .nbguard-chip');
    const { tick } = scene('idle');
    expect(chip?.textContent).toBe('live');
    model.set({ tick: { ...tick, fit: scene('training').tick.fit } });
    expect(chip?.textContent).toBe('training');
    model.set({ tick });
    expect(chip?.textContent).toBe('live');
  });

  it('that do not come are spoken of', () => {
    show();
    vi.advanceTimersByTime(3000);
    expect(root.querySelector('.nbguard-status')?.textContent).toBe('kernel not responding');
    model.set({ tick: scene('training').tick });
    expect(root.querySelector('.nbguard-status')?.textContent).toBe('training');
  });
});

describe('a new heap', () => {
  it('keeps the rows that stay, and the focus in them', () => {
    show();
    const ask = control(root, 'why losses');
    const row = ask.closest('tbody');
    ask.focus();
    const { heap } = scene('training');
    const holders = heap.holders.map(each => ({ ...each, nbytes: each.label === 'losses' ? 9 : each.id }));
    model.set({ heap: { ...heap, heap: 8, holders } });
    const loose = [...root.querySelectorAll('tbody')].filter(body => !body.textContent.startsWith('learn'));
    expect(loose[0]).toBe(row);
    expect(control(root, 'why losses')).toBe(ask);
    expect(document.activeElement).toBe(ask);
  });

  it('has what is open explained again, by the new ids', () => {
    show();
    control(root, 'why losses').click();
    model.say('why', { op: 'why', why });
    expect(root.textContent).toContain('losses → [0] → grad_fn');
    const { heap } = scene('training');
    model.set({ heap: { ...heap, heap: 8, holders: heap.holders.map(each => ({ ...each, id: each.id + 50 })) } });
    const id = heap.holders.find(each => each.label === 'losses')?.id ?? -1;
    expect(model.last('why')).toMatchObject({ heap: 8, id: id + 50 });
    control(root, 'why losses').click();
    expect(root.textContent).not.toContain('losses → [0] → grad_fn');
  });
});

describe('the next fit of a Learner', () => {
  const text = 'the next fit needs 11.2 of 14.6 GiB\n10.4 GiB is reserved at most\nnot counted: a';

  it('is predicted on request, and never again on its own', () => {
    show('idle');
    expect(model.all('predict')).toEqual([]);
    control(root, 'next fit learn').click();
    model.say('predict', { op: 'predicted', text });
    expect(root.textContent).toContain('the next fit needs 11.2 of 14.6 GiB');
    expect(root.textContent).toContain('not counted: a');
    const asked = model.last('predict');
    const { heap } = scene('idle');
    model.set({ heap: { ...heap, heap: 8 } });
    expect(root.textContent).not.toContain('the next fit needs');
    expect(model.last('predict')).toBe(asked);
  });

  it('says why it cannot be predicted', () => {
    show('idle');
    control(root, 'next fit learn').click();
    model.say('predict', { op: 'refused', why: 'model.1 is a LSTM' });
    expect(root.textContent).toContain('model.1 is a LSTM');
  });

  it('is not offered while it trains', () => {
    show('training');
    expect([...root.querySelectorAll('button')].map(each => each.getAttribute('aria-label'))).not.toContain('next fit learn');
  });
});

describe('a plan', () => {
  it('takes the focus, and gives it back when it is given up', () => {
    show();
    askForPlan();
    expect(headings(root)).toContain('Clean stale: the plan');
    expect((document.activeElement as HTMLElement).getAttribute('aria-labelledby')).toBeTruthy();
    document.activeElement?.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
    expect(headings(root)).not.toContain('Clean stale: the plan');
    expect(document.activeElement).toBe(control(root, 'Clean stale'));
    expect(model.all('apply')).toHaveLength(0);
  });

  it('leaves the focus where the reader types by now', () => {
    show();
    const editor = document.createElement('textarea');
    document.body.append(editor);
    control(root, 'Clean stale').click();
    editor.focus();
    model.say('plan', { op: 'plan', plan });
    expect(headings(root)).toContain('Clean stale: the plan');
    expect(document.activeElement).toBe(editor);
    editor.remove();
  });

  it('is made anew without what is unticked, and is applied as shown', () => {
    show();
    askForPlan();
    const boxes = [...root.querySelectorAll<HTMLInputElement>('.nbguard-plan input')].filter(isShown);
    expect(boxes.map(box => [box.checked, box.disabled])).toEqual([[true, false], [true, false], [true, true]]);
    boxes[1]?.click();
    expect(model.last('plan')).toMatchObject({ keep: ['Out[9]'] });
    expect(control(root, 'working…').getAttribute('aria-disabled')).toBe('true');
    const rows = plan.rows.map(row => ({ ...row, kept: row.key === 'Out[9]' }));
    model.say('plan', { op: 'plan', plan: { ...plan, token: 'token-2', confirm: 'Free 3.07 GiB', rows } });
    control(root, 'Free 3.07 GiB').click();
    expect(model.last('apply')).toMatchObject({ token: 'token-2' });
    model.say('apply', { op: 'done', outcome });
    expect(headings(root)).toContain('Just done');
    expect(root.querySelector('[aria-live]')?.textContent).toContain('Freed 3.05 GiB of 3.67 GiB promised. undo');
    expect(root.querySelector('[aria-live]')?.textContent).toContain('Out[9]: a thread runs with it');
    control(root, 'undo').click();
    expect(model.last('plan')).toMatchObject({ action: 'unpark', names: ['emb'] });
    control(root, 'Dismiss what').click();
    expect(headings(root)).not.toContain('Just done');
  });

  it('says what was done, and what was done is news for 30 s, or until the next cell', () => {
    show('stale');
    const finish = (): void => {
      askForPlan();
      control(root, plan.confirm).click();
      model.say('apply', { op: 'done', outcome });
    };
    const { tick } = scene('stale');
    finish();
    expect(root.querySelector('[aria-live]')?.textContent).toContain('last error: 2 variables of 1 frame released');
    vi.advanceTimersByTime(29_000);
    model.set({ tick: { ...tick, n: 1000 } });
    expect(headings(root)).toContain('Just done');
    control(root, 'Dismiss what').focus();
    vi.advanceTimersByTime(5_000);
    model.set({ tick: { ...tick, n: 1001 } });
    expect(headings(root)).toContain('Just done');
    (document.activeElement as HTMLElement).blur();
    model.set({ tick: { ...tick, n: 1002 } });
    expect(headings(root)).not.toContain('Just done');
    finish();
    expect(headings(root)).toContain('Just done');
    model.set({ tick: { ...tick, n: 1003, busy: true, cell: 16 } });
    expect(headings(root)).not.toContain('Just done');
  });

  it('is gone with the kernel that made it, as is what that has done', () => {
    show();
    askForPlan();
    model.set({ host: { kind: 'restarting' }, tick: {}, heap: {} });
    const { tick, heap } = scene('stale');
    model.set({ host: { kind: 'ok' }, tick: { ...tick, boot: 'next' }, heap: { ...heap, boot: 'next' } });
    expect(headings(root)).not.toContain('Clean stale: the plan');

    askForPlan();
    control(root, plan.confirm).click();
    model.say('apply', { op: 'done', outcome });
    expect(headings(root)).toContain('Just done');
    model.set({ tick: { ...tick, boot: 'one more' } });
    expect(headings(root)).not.toContain('Just done');
  });

  it('says what cannot be undone, and why there is nothing to apply', () => {
    show();
    control(root, 'release… losses').click();
    expect(model.last('plan')).toMatchObject({ action: 'release', heap: 7 });
    const irreversible = 'losses is deleted: this cannot be undone';
    model.say('plan', { op: 'plan', plan: { ...plan, irreversible, when: 'cell_end' } });
    expect(root.querySelector('.nbguard-plan')?.textContent).toContain(irreversible);
    expect(root.querySelector('.nbguard-plan')?.textContent).toContain('Nothing has been done yet. It is done when the cell ends.');
    control(root, 'Cancel').click();
    control(root, 'park losses').click();
    model.say('plan', { op: 'plan', plan: { ...plan, token: '', refused: 'It is parked already.' } });
    expect(root.querySelector('.nbguard-plan')?.textContent).toContain('It is parked already.');
    expect(() => control(root, plan.confirm)).toThrow();
  });
});

describe('what waits', () => {
  it('says "working…", then that it runs when the cell ends, and can be cancelled', () => {
    show();
    control(root, 'Empty cache').click();
    expect(control(root, 'Empty cache: working…').getAttribute('aria-disabled')).toBe('true');
    vi.advanceTimersByTime(1000);
    expect(root.querySelector('.nbguard-jobs')?.textContent).toContain('runs when the cell ends');
    control(root, 'Cancel Empty cache').click();
    expect(model.all('cancel')).toHaveLength(1);
    expect(control(root, 'Empty cache').getAttribute('aria-disabled')).toBeNull();
  });

  it('shows what the kernel says it waits for, and jobs of other views', () => {
    show();
    askForPlan();
    control(root, plan.confirm).click();
    model.say('apply', { op: 'queued', why: 'In[15] uses learn: it is released when the cell ends' });
    const { tick } = scene('training');
    model.set({ tick: { ...tick, jobs: [{ rid: 'x', title: 'Park emb', phase: 'queued', why: 'In[15] runs' }] } });
    const jobs = root.querySelector('.nbguard-jobs')?.textContent;
    expect(jobs).toContain('Clean stale: the planIn[15] uses learn: it is released when the cell ends');
    expect(jobs).toContain('Park embIn[15] runs');
    control(root, 'Cancel Park emb').click();
    expect(model.last('cancel')).toMatchObject({ rid: 'x' });
  });

  it('is refused in words', () => {
    show();
    control(root, 'release… losses').click();
    model.say('plan', { op: 'refused', why: 'a fit runs on it' });
    expect(headings(root)).toContain('Not done');
    expect(root.querySelector('[aria-live]')?.textContent).toContain('Release losses: a fit runs on it');
  });
});

describe('the menu', () => {
  it('is worked by keys', () => {
    show();
    const key = (name: string): void => {
      document.activeElement?.dispatchEvent(new KeyboardEvent('keydown', { key: name, bubbles: true }));
    };
    const more = control(root, 'More actions');
    more.focus();
    more.click();
    expect(more.getAttribute('aria-expanded')).toBe('true');
    expect(document.activeElement?.textContent).toBe('Stop workers');
    key('ArrowDown');
    expect(document.activeElement?.textContent).toBe('Refresh');
    key('ArrowDown');
    expect(document.activeElement?.textContent).toBe('Stop workers');
    key('Escape');
    expect(document.activeElement).toBe(more);
    key('ArrowDown');
    (document.activeElement as HTMLElement).click();
    expect(model.last('plan')).toMatchObject({ action: 'stop_workers' });
    expect(more.getAttribute('aria-expanded')).toBe('false');
  });
});

describe('nothing to show', () => {
  const states: [HostState, string][] = [
    [{ kind: 'no_kernel' }, 'No kernel to look at.'],
    [{ kind: 'not_loaded', notebook: 'a.ipynb' }, 'nbguard is not loaded in a.ipynb.'],
    [{ kind: 'not_python', notebook: 'a.ipynb', language: 'bash' }, 'The kernel of a.ipynb runs bash.'],
    [{ kind: 'disconnected' }, 'The connection to the kernel is lost.'],
    [{ kind: 'restarting' }, 'The kernel restarts.'],
    [{ kind: 'dead' }, 'The kernel has died.']
  ];

  it.each(states)('$kind is said in words', (host, words) => {
    model = new FakeModel({ ...scene('idle'), host });
    ({ root, close } = open(model));
    expect(root.textContent).toContain(words);
    expect(headings(root)).toEqual([]);
    model.set({ host: { kind: 'ok' } });
    expect(headings(root)).toContain('Held by');
  });

  it('offers to load nbguard where the host can', () => {
    const load = vi.fn();
    model = new FakeModel({ tick: {}, heap: {}, host: { kind: 'not_loaded', notebook: 'a.ipynb' } });
    ({ root, close } = open(model, { load }));
    control(root, 'Load nbguard').click();
    expect(load).toHaveBeenCalledOnce();
    model.set({ host: { kind: 'loading', notebook: 'a.ipynb', waits: true } });
    expect(root.textContent).toContain('It loads when the cell ends.');
    control(root, 'Load nbguard').click();
    expect(load).toHaveBeenCalledOnce();
    model.set({ host: { kind: 'not_loaded', notebook: 'a.ipynb' } });
    expect(root.textContent).toContain('%load_ext nbguard');
  });

  it.each<[LoadProblem, string, string]>([
    [{ kind: 'no_package', python: '/opt/env/bin/python' }, 'nbguard is not installed for the kernel of a.ipynb.', '%pip install nbguard'],
    [{ kind: 'no_package', python: '/opt/env/bin/python' }, 'nbguard is not installed for the kernel of a.ipynb.', '/opt/env/bin/python'],
    [{ kind: 'failed', error: 'OSError: <b>no</b>' }, 'nbguard could not be loaded in a.ipynb.', 'OSError: <b>no</b>'],
    [{ kind: 'not_run' }, 'nbguard could not be loaded in a.ipynb.', 'Try again.'],
    [{ kind: 'not_served' }, 'nbguard could not be loaded in a.ipynb.', '%gpumem']
  ])('says why nbguard could not be loaded, and offers it again: %o', (problem, sentence, note) => {
    const load = vi.fn();
    model = new FakeModel({ tick: {}, heap: {}, host: { kind: 'not_loaded', notebook: 'a.ipynb', problem } });
    ({ root, close } = open(model, { load }));
    expect(root.textContent).toContain(sentence);
    expect(root.textContent).toContain(note);
    control(root, 'Load nbguard').click();
    expect(load).toHaveBeenCalledOnce();
  });

  it('offers nothing for a kernel of another language', () => {
    model = new FakeModel({ tick: {}, heap: {}, host: { kind: 'not_python', notebook: 'a.ipynb', language: 'R' } });
    ({ root, close } = open(model, { load: vi.fn() }));
    expect([...root.querySelectorAll('button')].filter(each => !each.closest('[hidden]'))).toEqual([]);
  });

  it('waits for the first data; says that there is no PyTorch, no GPU', () => {
    model = new FakeModel();
    ({ root, close } = open(model));
    expect(root.textContent).toContain('Waiting for the first data…');
    const { tick } = scene('idle');
    model.set({ tick: { ...tick, tracked: '', devices: [] } });
    expect(root.textContent).toContain('PyTorch is not imported yet.');
    model.set({ tick: { ...tick, tracked: 'cpu' } });
    expect(root.textContent).toContain('No GPU in this process: CPU tensors are tracked.');
  });

  it('speaks the language of the host', () => {
    model = new FakeModel({ tick: {}, heap: {}, host: { kind: 'not_loaded', notebook: 'a.ipynb' } });
    ({ root, close } = open(model, { trans: { __: (text, ...args) => `«${text}|${args.join()}»` } }));
    expect(root.textContent).toContain('«nbguard is not loaded in %1.|a.ipynb»');
  });
});

describe('what is over, and what is chosen', () => {
  const MiB = 1024 ** 2;
  const oom = {
    title: 'Out of memory in In[5]',
    sentence: 'It asked.',
    fixes: [{ words: 'enough', nbytes: MiB, commands: ['%reset_gpu cache'] }],
    key: 'k-oom',
    cell: 5
  };
  const notices = [['`m` was deleted', '%reset_gpu Out[9]', '', 'k-notice', 4]];

  it('is dismissed by its own button, at once and for all views, and says which cell it is about', () => {
    const { tick, heap } = scene('idle');
    const went: number[] = [];
    const goToCell = (cell: number): boolean => went.push(cell) > 0;
    model = new FakeModel({ tick, heap: { ...heap, heap: 8, oom, notices, findings: [] } });
    ({ root, close } = open(model, { goToCell }));
    expect(headings(root)).toEqual(expect.arrayContaining(['Out of memory', 'Findings']));
    control(root, 'go to In[4]').click();
    control(root, 'go to In[5]').click();
    expect(went).toEqual([4, 5]);
    control(root, 'Dismiss: Out of memory in In[5]').click();
    expect(model.last('dismiss')).toEqual({ op: 'dismiss', key: 'k-oom' });
    expect(headings(root)).not.toContain('Out of memory');
    control(root, 'Dismiss: m was deleted').click();
    expect(model.last('dismiss')).toEqual({ op: 'dismiss', key: 'k-notice' });
    expect(headings(root)).not.toContain('Findings');
  });

  it('goes when the kernel takes it back', () => {
    const { tick, heap } = scene('stale');
    show('stale');
    const gone = heap.holders.filter(row => row.stale_bytes > 0);
    expect(gone.length).toBeGreaterThan(0);
    const holders = heap.holders.filter(row => row.stale_bytes === 0);
    model.set({ heap: { ...heap, heap: 8, holders, stale: 0 }, tick: { ...tick, heap: 8 } });
    expect(root.textContent).toContain('Nothing is stale');
    for (const { label } of gone) {
      expect(root.querySelector('.nbguard-holders')?.textContent).not.toContain(label);
    }
  });

  it('is dimmed and dated where other cells have run since it was looked at', () => {
    show('training');
    const { tick, heap } = scene('training');
    const holders = root.querySelector('.nbguard-holders');
    expect(holders?.classList.contains('nbguard-behind')).toBe(false);
    model.set({ tick: { ...tick, n: tick.n + 1, cell: (heap.cell ?? 0) + 5 } });
    expect(holders?.classList.contains('nbguard-behind')).toBe(true);
    expect(holders?.textContent).toContain(`not looked at since In[${String(heap.cell)}]`);
  });

  it('releases several rows at once', () => {
    show('training');
    const { heap } = scene('training');
    const rows = heap.holders.filter(row => row.can.includes('release') && !row.is_small);
    expect(rows.length).toBeGreaterThan(1);
    for (const row of rows) {
      control(root, `select ${row.label}`).click();
    }
    expect(root.querySelector('.nbguard-selection')?.textContent).toContain(`${String(rows.length)} selected`);
    control(root, 'release… what is selected').click();
    expect(model.last('plan')).toMatchObject({ action: 'release', heap: heap.heap, ids: rows.map(row => row.id) });
    expect(isShown(root.querySelector('.nbguard-selection') ?? root)).toBe(false);
  });

  it('moves from row to row by arrow keys, and Tab stops at one row only', () => {
    show('training');
    const press = (key: string): void => {
      document.activeElement?.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
    };
    const name = (): string | null | undefined => document.activeElement?.getAttribute('aria-label');
    const [first, second] = [...root.querySelectorAll<HTMLElement>('[data-kind=why]')];
    first?.focus();
    press('ArrowDown');
    expect(document.activeElement).toBe(second);
    press('ArrowRight');
    expect(name()?.startsWith('why')).toBe(false);
    press('ArrowLeft');
    press('ArrowUp');
    expect(document.activeElement).toBe(first);
    press('End');
    expect(document.activeElement?.closest('tbody')).toBe([...root.querySelectorAll('tbody')].pop());
    const reached = [...root.querySelectorAll<HTMLElement>('tbody button')].filter(each => isShown(each) && each.tabIndex === 0);
    expect([...new Set(reached.map(each => each.closest('tbody')))]).toEqual([document.activeElement?.closest('tbody')]);
  });

  it('says how much of all the filter shows', () => {
    show('many');
    const filter = control(root, 'Filter') as HTMLInputElement;
    filter.value = scene('many').heap.holders[3]?.label ?? '';
    filter.dispatchEvent(new Event('input'));
    expect(root.querySelector('tfoot')?.textContent).toMatch(/^\d+ shown · [\d.]+ [KMG]iB of[\d.]+ [KMG]iB$/);
  });

  it('takes the focus to a plan that a command has opened from outside of the view', () => {
    show('stale');
    const panel = root.parentElement;
    panel?.setAttribute('tabindex', '-1');
    panel?.focus();
    control(root, 'Clean stale').click();
    model.say('plan', { op: 'plan', plan });
    expect(document.activeElement).toBe(root.querySelector('.nbguard-plan'));
  });

  it('has no full bar where nobody knows the whole, and says that no tensor is held', () => {
    const { tick, heap } = scene('idle');
    const devices = [{ ...tick.devices[0], total: null, parts: [{ name: 'process', nbytes: 5, note: '' }] }];
    model = new FakeModel({ tick: { ...tick, tracked: 'cpu', devices }, heap: { ...heap, heap: 8, holders: [], experiments: [] } });
    ({ root, close } = open(model));
    expect(isShown(root.querySelector('.nbguard-bar') ?? root)).toBe(false);
    expect(root.textContent).toContain('No tensor is held in memory.');
  });
});
