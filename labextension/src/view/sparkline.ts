/** The bytes in use over the last minutes, with a mark where a cell or an epoch began. */

import { formatBytes } from './bytes';
import { element, type ItemView, KeyedList, setAttribute, setText, show, slowLabel } from './dom';
import type { DeviceTick, TimeMark } from './protocol';
import { duration, type Trans } from './words';

const SVG = 'http://www.w3.org/2000/svg';
const WIDTH = 1000;
const HEIGHT = 100;
/** Share of the width within which two marks cannot be told apart. */
const CLOSE = 0.04;

interface MarkItem extends TimeMark {
  /** Where it begins and how much room it has, as shares of the width. */
  left: number;
  width: number;
}

export class Sparkline {
  readonly node = element('div', 'nbguard-spark');
  private readonly line = document.createElementNS(SVG, 'path');
  private readonly area = document.createElementNS(SVG, 'path');
  private readonly chart = element('div', 'nbguard-spark-chart');
  private readonly marks = element('div', 'nbguard-marks');
  private readonly span = element('span');
  private readonly peak = element('span', 'nbguard-figure');
  private readonly list = new KeyedList<MarkItem>(this.marks, mark => `${String(mark.t)} ${mark.label}`, markView);
  private readonly label = slowLabel(this.chart);

  constructor(private readonly trans: Trans) {
    const svg = document.createElementNS(SVG, 'svg');
    svg.setAttribute('viewBox', `0 0 ${String(WIDTH)} ${String(HEIGHT)}`);
    svg.setAttribute('preserveAspectRatio', 'none');
    this.area.setAttribute('class', 'nbguard-spark-area');
    this.line.setAttribute('class', 'nbguard-spark-line');
    svg.append(this.area, this.line);
    this.marks.setAttribute('aria-hidden', 'true');
    this.chart.setAttribute('role', 'img');
    this.chart.append(svg, this.marks);
    this.node.append(this.chart, element('div', 'nbguard-spark-words nbguard-dim', this.span, this.peak));
  }

  update(device: DeviceTick, marks: readonly TimeMark[]): void {
    const [first] = device.spark;
    const last = device.spark[device.spark.length - 1];
    show(this.chart, device.spark.length > 1);
    setText(this.peak, device.peak === null ? '' : this.trans.__('peak %1', formatBytes(device.peak)));
    if (first === undefined || last === undefined || last[0] <= first[0]) {
      setText(this.span, '');
      return;
    }
    const span = last[0] - first[0];
    this.draw(device.spark, first[0], span);
    this.list.update(placed(marks, first[0], span));
    const words = this.trans.__('in use, last %1', duration(span, this.trans));
    setText(this.span, words);
    this.label(`${words}: ${formatBytes(last[1])}`);
  }

  private draw(spark: readonly [number, number][], start: number, span: number): void {
    const top = Math.max(1, ...spark.map(([, nbytes]) => nbytes)) * 1.08;
    const points = spark.map(([t, nbytes]) => {
      const x = ((t - start) / span) * WIDTH;
      return `${x.toFixed(1)},${(HEIGHT * (1 - nbytes / top)).toFixed(1)}`;
    });
    const line = `M${points.join('L')}`;
    setAttribute(this.line, 'd', line);
    setAttribute(this.area, 'd', `${line}L${String(WIDTH)},${String(HEIGHT)}L0,${String(HEIGHT)}Z`);
  }
}

/** The marks that lie in the time shown, each with the room up to the next. Epochs close to another mark are left out. */
function placed(marks: readonly TimeMark[], start: number, span: number): MarkItem[] {
  const shown: TimeMark[] = [];
  for (const mark of marks) {
    const isApart = mark.t - (shown[shown.length - 1]?.t ?? -Infinity) >= CLOSE * span;
    if (mark.t >= start && mark.t <= start + span && (isApart || isCell(mark))) {
      shown.push(mark);
    }
  }
  return shown.map((mark, i) => {
    const left = (mark.t - start) / span;
    const end = shown[i + 1]?.t ?? start + span;
    return { ...mark, left, width: (end - start) / span - left };
  });
}

function isCell(mark: TimeMark): boolean {
  return mark.label.startsWith('In[');
}

/** A mark. Its label wraps out of sight where it has no room. */
function markView(): ItemView<MarkItem> {
  const label = element('span');
  const node = element('div', 'nbguard-mark', element('div', '', element('i'), label));
  return {
    node,
    update: mark => {
      setText(label, mark.label);
      node.style.left = `${(mark.left * 100).toFixed(2)}%`;
      node.style.width = `${(mark.width * 100).toFixed(2)}%`;
    }
  };
}
