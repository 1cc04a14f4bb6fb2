/** One device: the bar of its memory, what each part is, and how it went. */

import { formatBytes, formatColumn } from './bytes';
import { element, type ItemView, KeyedList, percent, setAttribute, setClass, setText, show, slowLabel } from './dom';
import { LineChart, type LineContext } from './line';
import { type DevicePart, type DeviceTick, isDevicePart, type Part } from './protocol';
import { deviceName } from './words';

export interface DeviceItem {
  /** The run of the kernel. */
  boot: string;
  device: DeviceTick;
  /** Whether there are others, so that each has to be named. */
  isNamed: boolean;
}

interface PartItem extends Part {
  figure: string;
  share: number;
}

const COLOURS: Readonly<Record<DevicePart, string>> = {
  allocated: 'used',
  process: 'other',
  releasable: 'releasable',
  cached: 'releasable',
  stranded: 'stranded',
  'graph pools': 'kept',
  pending: 'pending',
  context: 'context',
  libraries: 'other',
  others: 'other',
  'others and contexts': 'other',
  driver: 'driver',
  free: 'free',
  spilled: 'other'
};

/** The class that colours a part of the bar. */
function colour(part: string): string {
  return `c-${isDevicePart(part) ? COLOURS[part] : 'other'}`;
}

export class DeviceView implements ItemView<DeviceItem> {
  readonly node = element('section', 'section device');
  readonly #title = element('h3', 'title plain');
  readonly #bar = element('div', 'bar');
  readonly #key = element('ul', 'key');
  readonly #pieces = new KeyedList<PartItem>(this.#bar, part => part.name, piece);
  readonly #entries = new KeyedList<PartItem>(this.#key, part => part.name, entry);
  readonly #label = slowLabel(this.#bar);
  readonly #line: LineChart;
  #names: string[] = [];

  readonly #context: LineContext;

  constructor(context: LineContext) {
    this.#context = context;
    this.#line = new LineChart(context);
    this.#bar.setAttribute('role', 'img');
    this.node.append(this.#title, this.#bar, this.#key, this.#line.node);
  }

  update({ device, isNamed }: DeviceItem): void {
    show(this.#title, isNamed);
    setText(this.#title, deviceName(device));
    const parts = this.#partsOf(device);
    this.#pieces.update(parts);
    this.#entries.update(parts);
    show(this.#bar, device.total !== null || parts.length > 1); // one part of nobody knows what would be a bar that is full
    this.#label(this.#words(device, parts));
    this.#line.update(device);
  }

  /** The parts as shown. One that has been there once stays, at 0: the lines below would jump at every tick otherwise. */
  #partsOf(device: DeviceTick): PartItem[] {
    const present = device.parts.filter(part => part.nbytes > 0 || this.#names.includes(part.name));
    const gone = this.#names.filter(name => !device.parts.some(part => part.name === name));
    const order = [...device.parts.map(part => part.name), ...gone];
    const all: Part[] = [...present, ...gone.map(name => ({ name, nbytes: 0, note: '' }))];
    all.sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name));
    this.#names = all.map(part => part.name);
    const figures = formatColumn(all.map(part => part.nbytes));
    const whole = Math.max(1, device.total ?? 0, all.reduce((sum, part) => sum + part.nbytes, 0));
    return all.map((part, i) => ({ ...part, figure: figures[i] ?? '', share: Math.max(0, part.nbytes) / whole }));
  }

  #words(device: DeviceTick, parts: readonly PartItem[]): string {
    const listed = parts.map(part => `${part.name} ${part.figure}`).join(', ');
    return device.total === null ? listed : this.#context.trans.__('%1; %2 in all', listed, formatBytes(device.total));
  }
}

function piece(): ItemView<PartItem> {
  const node = element('i');
  return {
    node,
    update: part => {
      setClass(node, colour(part.name));
      setAttribute(node, 'title', `${part.name} ${part.figure}`);
      node.style.width = percent(part.share);
      show(node, part.nbytes > 0);
    }
  };
}

function entry(): ItemView<PartItem> {
  const swatch = element('i');
  const name = element('span');
  const note = element('span', 'dim');
  const figure = element('span', 'figure');
  const node = element('li', '', swatch, element('span', 'key-words', name, note), figure);
  return {
    node,
    update: part => {
      setClass(swatch, colour(part.name));
      setText(name, part.name);
      setText(note, part.note);
      setAttribute(node, 'title', part.note || null);
      setText(figure, part.figure);
    }
  };
}
