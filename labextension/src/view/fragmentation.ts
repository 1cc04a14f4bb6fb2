/** The allocator's segments as strips, and the largest request that would succeed. */

import { formatBytes } from './bytes';
import { element, type ItemView, KeyedList, percent, setAttribute, setClass, setSentence, setText, show } from './dom';
import type { DeviceSegments, FittingRequest, MemoryState, PieceKind, Strip, Tick } from './protocol';
import type { Trans } from './words';

const PER_LINE = 12;
const LINES = 4;

interface StripItem {
  strip: Strip;
  /** Share of a line. */
  width: number;
}

const COLOURS: Readonly<Record<PieceKind, string>> = {
  allocated: 'used',
  releasable: 'releasable',
  stranded: 'stranded',
  kept: 'kept'
};

export class FragmentationSection {
  readonly node = element('section', 'section');
  readonly #list: KeyedList<DeviceItem>;
  #heap: MemoryState | null = null;
  #tick: Tick | null = null;

  constructor(trans: Trans) {
    const devices = element('div');
    this.#list = new KeyedList(
      devices,
      device => device.device,
      () => deviceView(trans)
    );
    this.node.append(element('h3', 'title', trans.__('Fragmentation')), devices);
  }

  update(heap: MemoryState | null): void {
    this.#heap = heap;
    this.#draw();
  }

  /** Take what a tick knows sooner than a look: the largest request that fits by what is free now. */
  follow(tick: Tick): void {
    this.#tick = tick;
    this.#draw();
  }

  #draw(): void {
    const [heap, tick] = [this.#heap, this.#tick];
    const devices = heap?.devices ?? [];
    show(this.node, devices.length > 0);
    const isOfThis = tick !== null && tick.boot === heap?.boot && tick.heap === heap.heap;
    this.#list.update(
      devices.map(device => {
        const fits = isOfThis ? (tick.devices.find(each => each.device === device.device)?.fits ?? null) : null;
        return { ...device, isNamed: devices.length > 1, fits };
      })
    );
  }
}

interface DeviceItem extends DeviceSegments {
  /** Whether there are others, so that each has to be named. */
  isNamed: boolean;
  /** The largest request by what is free now; null: blocks have changed since the look. */
  fits: FittingRequest | null;
}

function deviceView(trans: Trans): ItemView<DeviceItem> {
  const name = element('div', 'dim');
  const strips = new Strips(trans);
  const largest = element('div');
  const sentence = element('div', 'dim wrap');
  return {
    node: element('div', 'fragments', name, strips.node, largest, sentence),
    update: device => {
      setText(name, device.device);
      show(name, device.isNamed);
      strips.update(device);
      setText(largest, largestWords(device, trans));
      setSentence(sentence, sentenceOf(device, trans));
      show(sentence, sentence.hasChildNodes());
    }
  };
}

/** Segments as strips, on so many lines that the small ones can be seen. */
export class Strips {
  readonly node = element('div', 'strips');
  readonly #list: KeyedList<StripItem & { at: number }>;

  readonly #trans: Trans;

  constructor(trans: Trans) {
    this.#trans = trans;
    this.#list = new KeyedList(
      this.node,
      item => String(item.at),
      () => stripView(trans)
    );
    this.node.setAttribute('role', 'img');
  }

  update(drawn: Pick<DeviceSegments, 'segments' | 'strips'>): void {
    setClass(this.node, drawn.strips.length > PER_LINE ? 'strips' : 'strips one-line');
    this.#list.update(placed(drawn.strips).map((item, at) => ({ ...item, at })));
    setAttribute(this.node, 'aria-label', label(drawn, this.#trans));
  }
}

function largestWords(device: DeviceItem, trans: Trans): string {
  if (device.fits !== null) {
    return trans.__('Largest request that fits now: %1', formatBytes(device.fits[0]));
  }
  return device.largest_now === null
    ? trans.__('The largest request that fits is not known.')
    : trans.__('Largest request that fitted then: %1', formatBytes(device.largest_now));
}

function sentenceOf(device: DeviceItem, trans: Trans): string {
  const [now, flushed] = device.fits ?? [device.largest_now, device.largest_flushed];
  const after = flushed === null || flushed === now ? '' : trans.__('%1 after Empty cache.', formatBytes(flushed));
  return [after, device.sentence].filter(part => part !== '').join(' ');
}

/** Strips with their widths to one scale. */
function placed(strips: readonly Strip[]): StripItem[] {
  const total = strips.reduce((sum, strip) => sum + strip.nbytes, 0);
  const lines = Math.min(LINES, Math.ceil(strips.length / PER_LINE));
  return strips.map(strip => ({ strip, width: Math.min(1, (strip.nbytes / Math.max(1, total)) * lines) }));
}

function stripView(trans: Trans): ItemView<StripItem & { at: number }> {
  const node = element('b');
  const pieces = new KeyedList<[PieceKind, number, number]>(node, ([, , at]) => String(at), pieceView);
  return {
    node,
    update: ({ strip, width }) => {
      node.style.flexBasis = `calc(${percent(width)} - 2px)`;
      const title = strip.pieces.map(([kind, nbytes]) => `${kind} ${formatBytes(nbytes)}`).join(', ');
      setAttribute(node, 'title', strip.segments > 1 ? `${trans.__('%1 segments', strip.segments)}: ${title}` : title);
      pieces.update(strip.pieces.map(([kind, nbytes], at) => [kind, nbytes, at]));
    }
  };
}

function pieceView(): ItemView<[PieceKind, number, number]> {
  const node = element('i');
  return {
    node,
    update: ([kind, nbytes]) => {
      setClass(node, `c-${COLOURS[kind]}`);
      node.style.flexGrow = String(nbytes);
    }
  };
}

function label(device: Pick<DeviceSegments, 'segments' | 'strips'>, trans: Trans): string {
  const sums = new Map<PieceKind, number>();
  for (const [kind, nbytes] of device.strips.flatMap(strip => strip.pieces)) {
    sums.set(kind, (sums.get(kind) ?? 0) + nbytes);
  }
  const words = [...sums].map(([kind, nbytes]) => `${kind} ${formatBytes(nbytes)}`).join(', ');
  return `${trans.__('%1 segments', device.segments)}: ${words}`;
}
