/** The bytes in use over time: a line of steps with a mark for each cell, its values by mouse and keyboard, and as files. */

import { formatBytes } from './bytes';
import { element, type ItemView, KeyedList, percent, setAttribute, setClass, setText, show, slowLabel } from './dom';
import type { Host } from './host';
import {
  axisBytes,
  clock,
  type Frame,
  frameOf,
  HEIGHT,
  type PlacedMark,
  placedCells,
  placedEpochs,
  placedRequests,
  share,
  stepPath,
  WIDTH
} from './line_drawing';
import type { Colours } from './line_export';
import { cellAt, pointAt } from './line_points';
import { type LineSource, SPANS, type Span } from './line_source';
import { Menu } from './menu';
import type { DeviceTick, LinePoint, TimeMark } from './protocol';
import { deviceName, duration, join, type Trans } from './words';

const SVG = 'http://www.w3.org/2000/svg';

/** A file of its own in JupyterLab: few save a line. */
const exporters = (): Promise<typeof import('./line_export')> => import('./line_export');

export interface LineContext {
  readonly trans: Trans;
  readonly source: LineSource;
  /** Show the cell with this number. Undefined where the host has no cells: marks are no buttons there. */
  readonly goToCell: Host['goToCell'];
}

interface CellItem extends PlacedMark {
  words: string;
  /** Height of its peak, as a share of the picture; null: not known. */
  peak: number | null;
}

export class LineChart {
  readonly node = element('div', 'chart');
  readonly #plot = element('div', 'chart-plot');
  readonly #path = document.createElementNS(SVG, 'path');
  readonly #area = document.createElementNS(SVG, 'path');
  readonly #svg = document.createElementNS(SVG, 'svg');
  readonly #scale = [element('span'), element('span')] as const;
  readonly #times = [element('span'), element('span'), element('span')] as const;
  readonly #timesRow = element('div', 'chart-times dim', ...this.#times);
  readonly #cells: KeyedList<CellItem>;
  readonly #epochs: KeyedList<PlacedMark>;
  readonly #requests: KeyedList<PlacedMark>;
  readonly #cursor = element('i', 'chart-cursor');
  readonly #value = element('div', 'chart-value');
  readonly #spoken = element('div', 'spoken');
  readonly #span = element('select', 'chart-span');
  readonly #peak = element('span', 'figure');
  readonly #label: (label: string) => void;
  #device: DeviceTick | null = null;
  #frame: Frame | null = null;
  /** The time that the cursor is at; null: it is not shown. */
  #at: number | null = null;

  readonly #context: LineContext;

  constructor(context: LineContext) {
    this.#context = context;
    const { trans } = context;
    this.#svg.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
    this.#svg.setAttribute('preserveAspectRatio', 'none');
    this.#svg.setAttribute('role', 'img');
    this.#label = slowLabel(this.#svg);
    setClass(this.#area, 'chart-area');
    setClass(this.#path, 'chart-path');
    this.#svg.append(this.#area, this.#path);
    const cells = element('div', 'marks');
    const epochs = element('div', 'marks');
    const requests = element('div', 'marks');
    this.#cells = new KeyedList<CellItem>(cells, ({ mark }) => key(mark), () => this.#cellView());
    this.#epochs = new KeyedList<PlacedMark>(epochs, ({ mark }) => key(mark), () => markView('mark-epoch'));
    this.#requests = new KeyedList<PlacedMark>(requests, ({ mark }) => key(mark), () => markView('mark-request'));
    const area = this.#keyboardArea();
    this.#plot.append(this.#svg, epochs, requests, cells, area, this.#cursor, this.#value);
    const scale = element('div', 'chart-scale dim', ...this.#scale);
    scale.setAttribute('aria-hidden', 'true');
    this.#timesRow.setAttribute('aria-hidden', 'true');
    this.#spoken.setAttribute('role', 'status'); // polite
    this.node.append(element('div', 'chart-picture', scale, this.#plot), this.#timesRow, this.#words(), this.#spoken);
    this.#hideCursor();
    show(this.#plot, false);
    setText(this.#spoken, '');
    this.#label(trans.__('Memory in use over time'));
  }

  update(device: DeviceTick): void {
    const { source, trans } = this.#context;
    this.#device = device;
    setText(this.#peak, device.peak === null ? '' : trans.__('peak %1', formatBytes(device.peak)));
    show(this.node, device.line !== null || this.#points.length > 0);
    const frame = (this.#frame = frameOf(this.#points, source.span));
    show(this.#plot, frame !== null);
    show(this.#timesRow, frame !== null);
    if (frame === null) {
      this.#scale.forEach(label => { setText(label, ''); });
      return;
    }
    const { line, area } = stepPath(this.#points, frame);
    setAttribute(this.#path, 'd', line);
    setAttribute(this.#area, 'd', area);
    setText(this.#scale[0], axisBytes(frame.top));
    setText(this.#scale[1], axisBytes(frame.top / 2));
    const withSeconds = frame.end - frame.start < 600;
    this.#times.forEach((label, i) => {
      setText(label, clock(frame.start + (i / 2) * (frame.end - frame.start), withSeconds));
    });
    this.#drawMarks(frame);
    this.#label(`${this.#spanWords(frame)}: ${formatBytes(device.line?.[4] ?? null)}`);
    if (this.#at !== null) {
      this.#moveCursor(this.#at);
    }
  }

  get #points(): readonly LinePoint[] {
    return this.#device === null ? [] : this.#context.source.of(this.#device.device);
  }

  #drawMarks(frame: Frame): void {
    const { marks } = this.#context.source;
    const device = this.#device?.device ?? '';
    this.#cells.update(
      placedCells(marks, frame).map(placed => {
        const peak = placed.mark.peaks.find(([name]) => name === device);
        return { ...placed, words: this.#peakWords(placed.mark, peak), peak: peak === undefined ? null : peak[1] / frame.top };
      })
    );
    this.#epochs.update(placedEpochs(marks, frame));
    this.#requests.update(placedRequests(marks, device, frame));
  }

  #peakWords(mark: TimeMark, peak: TimeMark['peaks'][number] | undefined): string {
    const { trans } = this.#context;
    if (peak === undefined) {
      return mark.label;
    }
    const figure = formatBytes(peak[1]);
    return join([mark.label, peak[2] ? trans.__('peak %1', figure) : trans.__('peak at least %1', figure)]);
  }

  /** The span to choose, the highest peak, and the menu with the files. */
  #words(): HTMLElement {
    const { trans, source } = this.#context;
    const names = [trans.__('1 min'), trans.__('10 min'), trans.__('all')];
    SPANS.forEach((span, i) => {
      const option = element('option', '', names[i] ?? '');
      option.value = String(span);
      this.#span.append(option);
    });
    this.#span.value = String(source.span);
    this.#span.setAttribute('aria-label', trans.__('Time shown'));
    this.#span.addEventListener('change', () => {
      source.show(Number(this.#span.value) as Span);
    });
    const menu = new Menu(trans.__('Save the line'), [
      [trans.__('Save as picture (PNG)'), () => void this.#savePicture()],
      [trans.__('Save as table (CSV)'), () => void this.#saveTable()]
    ]);
    return element('div', 'chart-words dim', this.#span, this.#peak, menu.node);
  }

  #spanWords(frame: Frame): string {
    return this.#context.trans.__('in use, last %1', duration(frame.end - frame.start, this.#context.trans));
  }

  // --- cells ---

  /** A cell: a line where it began, its peak, and its label below, which goes to the cell where the host can. */
  #cellView(): ItemView<CellItem> {
    const { goToCell, trans } = this.#context;
    const peak = element('i', 'mark-peak');
    const label = element('span');
    let mark: TimeMark | null = null;
    const text = element(goToCell === undefined ? 'div' : 'button', 'mark-label', element('i'), label);
    if (text instanceof HTMLButtonElement) {
      text.type = 'button';
      text.tabIndex = -1; // by keyboard: Enter at the cursor
      text.addEventListener('click', () => {
        this.#goTo(mark);
      });
    }
    const node = element('div', 'mark', peak, text);
    return {
      node,
      update: item => {
        mark = item.mark;
        setText(label, mark.label);
        place(node, item);
        setAttribute(text, 'title', item.words);
        setAttribute(text, 'aria-label', goToCell === undefined ? null : trans.__('Go to %1', item.words));
        show(peak, item.peak !== null);
        peak.style.bottom = `calc(14px + ${((item.peak ?? 0) * 64).toFixed(1)}px)`; // the labels' strip, the picture's height
        setAttribute(peak, 'title', item.words);
      }
    };
  }

  #goTo(mark: TimeMark | null): void {
    const { goToCell, trans } = this.#context;
    if (mark !== null && mark.cell !== null && goToCell?.(mark.cell, mark.cell_id) === false) {
      setText(this.#spoken, trans.__('%1 is no longer in the notebook.', mark.label));
    }
  }

  // --- the cursor ---

  /** The part of the picture that follows the mouse and takes the keyboard. */
  #keyboardArea(): HTMLElement {
    const { trans } = this.#context;
    const area = element('div', 'chart-area-keys');
    area.tabIndex = 0;
    area.setAttribute('role', 'application');
    area.setAttribute('aria-label', trans.__('Memory over time: arrow keys move the cursor, Enter goes to the cell'));
    area.addEventListener('pointermove', event => {
      const box = area.getBoundingClientRect();
      if (this.#frame !== null && box.width > 0) {
        this.#moveCursor(this.#frame.start + ((event.clientX - box.left) / box.width) * (this.#frame.end - this.#frame.start));
      }
    });
    for (const left of ['pointerleave', 'blur']) {
      area.addEventListener(left, () => {
        this.#hideCursor();
      });
    }
    area.addEventListener('keydown', event => {
      this.#onKey(event);
    });
    return area;
  }

  #onKey(event: KeyboardEvent): void {
    const frame = this.#frame;
    if (frame === null) {
      return;
    }
    if (event.key === 'Enter') {
      this.#goTo(this.#at === null ? null : cellAt(this.#context.source.marks, this.#at));
    } else if (event.key === 'Escape' && this.#at !== null) {
      this.#hideCursor();
    } else {
      const to = this.#target(event.key, frame);
      if (to === null) {
        return;
      }
      this.#moveCursor(to);
      setText(this.#spoken, this.#value.textContent);
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** The time that a key moves the cursor to; null: it moves it nowhere. */
  #target(key: string, frame: Frame): number | null {
    const at = this.#at ?? frame.end;
    const changes = this.#points.map(([since]) => Math.max(frame.start, since));
    const cells = placedCells(this.#context.source.marks, frame).map(({ mark }) => Math.max(frame.start, mark.t));
    const before = (times: readonly number[]): number => Math.max(frame.start, ...times.filter(t => t < at));
    const after = (times: readonly number[]): number => Math.min(frame.end, ...times.filter(t => t > at));
    switch (key) {
      case 'ArrowLeft':
        return before([...changes, ...cells]);
      case 'ArrowRight':
        return after([...changes, ...cells]);
      case 'PageUp':
        return before(cells);
      case 'PageDown':
        return after(cells);
      case 'Home':
        return frame.start;
      case 'End':
        return frame.end;
      default:
        return null;
    }
  }

  #moveCursor(t: number): void {
    const frame = this.#frame;
    if (frame === null) {
      return;
    }
    this.#at = Math.min(frame.end, Math.max(frame.start, t));
    const left = share(this.#at, frame);
    this.#cursor.style.left = this.#value.style.left = percent(left);
    this.#value.style.transform = `translateX(-${percent(left)})`;
    setText(this.#value, this.#valueWords(this.#at));
    show(this.#cursor, true);
    show(this.#value, true);
  }

  /** `12:03:05 · In[4] · 3.52 GiB allocated, 4.1 GiB reserved`. */
  #valueWords(t: number): string {
    const { trans, source } = this.#context;
    const point = pointAt(this.#points, t);
    const where = [clock(t, true), cellAt(source.marks, t)?.label ?? ''];
    if (point === null) {
      return join([...where, trans.__('not known: no panel was open')]);
    }
    const isBucket = point.low !== point.high;
    const figures = [
      trans.__('%1 allocated', formatBytes(point.allocated)),
      isBucket ? trans.__('up to %1', formatBytes(point.high)) : '',
      point.reserved === null ? '' : trans.__('%1 reserved', formatBytes(point.reserved))
    ];
    return join([...where, figures.filter(part => part !== '').join(', ')]);
  }

  #hideCursor(): void {
    this.#at = null;
    show(this.#cursor, false);
    show(this.#value, false);
  }

  // --- files ---

  async #saveTable(): Promise<void> {
    const { csvOf, save } = await exporters();
    const text = csvOf(this.#points, this.#context.source.marks);
    save(new Blob([text], { type: 'text/csv' }), `${this.#fileName()}.csv`);
  }

  async #savePicture(): Promise<void> {
    const [device, frame, points] = [this.#device, this.#frame, this.#points];
    if (device === null || frame === null) {
      return;
    }
    const { pngOf, save, svgOf } = await exporters();
    const title = join([deviceName(device), this.#spanWords(frame)]);
    const svg = svgOf(title, device.device, points, this.#context.source.marks, frame, this.#colours());
    save(await pngOf(svg), `${this.#fileName()}.png`);
  }

  #fileName(): string {
    return `memory-${(this.#device?.device ?? '').replace(/[^a-z0-9]+/gi, '-')}`;
  }

  #colours(): Colours {
    const style = getComputedStyle(this.node);
    const named = (name: string, other: string): string => style.getPropertyValue(name).trim() || other;
    return {
      line: getComputedStyle(this.#path).stroke || named('--used', '#1976d2'),
      text: style.color || '#333',
      background: named('--jp-layout-color1', '#fff')
    };
  }
}

function markView(name: string): ItemView<PlacedMark> {
  const label = element('span');
  const node = element('div', `mark ${name}`, element('div', 'mark-label', element('i'), label));
  return {
    node,
    update: item => {
      setText(label, item.mark.label);
      setAttribute(node, 'title', item.mark.label);
      place(node, item);
    }
  };
}

function place(node: HTMLElement, { left, width }: PlacedMark): void {
  node.style.left = percent(left);
  node.style.width = percent(width);
}

function key(mark: TimeMark): string {
  return `${mark.label} ${mark.t}`;
}
