/** A device's line as files: the picture as PNG, the readings as CSV. */

import { formatBytes } from './bytes';
import { axisBytes, clock, type Frame, HEIGHT, placedCells, placedRequests, share, stepPath, WIDTH } from './line_drawing';
import { cellAt, reading } from './line_points';
import type { LinePoint, TimeMark } from './protocol';

const HEAD = 'time,cell,allocated,reserved,used by others,free,least allocated,most allocated';
const MARGIN = { left: 80, top: 24, bottom: 46 };
const PICTURE = { width: WIDTH + MARGIN.left + 20, height: 320 };

/** The readings as CSV, sizes in bytes: a row at the beginning and the end of each stretch in which they are equal. */
export function csvOf(points: readonly LinePoint[], marks: readonly TimeMark[]): string {
  let before = Infinity; // the reading before: a cell of milliseconds runs between two readings
  const rows = points.flatMap(point => {
    const { since, until, low, high, allocated, reserved, others, free } = reading(point);
    const times = low === high && until > since ? [since, until] : [until];
    return times.map(t => {
      const cell = cellAt(marks, t, before)?.cell ?? '';
      before = t;
      return [time(t), cell, allocated, reserved ?? '', others ?? '', free ?? '', low, high].join(',');
    });
  });
  return [HEAD, ...rows, ''].join('\n');
}

/** ISO 8601 in UTC, to the millisecond. */
function time(t: number): string {
  return new Date(t * 1000).toISOString();
}

export interface Colours {
  line: string;
  text: string;
  background: string;
}

/** The picture as an SVG document that stands alone, with its axes, cells and peaks. */
export function svgOf(
  title: string,
  device: string,
  points: readonly LinePoint[],
  marks: readonly TimeMark[],
  frame: Frame,
  { line, text, background }: Colours
): string {
  const height = PICTURE.height - MARGIN.top - MARGIN.bottom;
  const x = (t: number): number => MARGIN.left + share(t, frame) * WIDTH;
  const y = (nbytes: number): number => MARGIN.top + height * (1 - nbytes / frame.top);
  const write = (at: number, from: number, words: string, anchor = 'start'): string =>
    `<text x="${at.toFixed(1)}" y="${from.toFixed(1)}" text-anchor="${anchor}">${escape(words)}</text>`;
  const rule = (nbytes: number): string =>
    `<path d="M${MARGIN.left},${y(nbytes).toFixed(1)}h${WIDTH}" stroke="${text}" stroke-opacity="0.2"/>` +
    write(MARGIN.left - 8, y(nbytes) + 4, axisBytes(nbytes), 'end');
  const path = stepPath(points, frame);
  const place = `translate(${MARGIN.left},${MARGIN.top}) scale(1,${height / HEIGHT})`;
  const withSeconds = frame.end - frame.start < 600;
  const times = [0, 0.25, 0.5, 0.75, 1].map(part => {
    const t = frame.start + part * (frame.end - frame.start);
    return write(x(t), PICTURE.height - 8, clock(t, withSeconds), part === 0 ? 'start' : part === 1 ? 'end' : 'middle');
  });
  const cells = placedCells(marks, frame).map(({ mark, left, width }) => {
    const at = MARGIN.left + left * WIDTH;
    const label = mark.label.length * 8 < width * WIDTH ? write(at + 3, PICTURE.height - 30, mark.label) : '';
    return `<path d="M${at.toFixed(1)},${MARGIN.top}v${height + 20}" stroke="${text}" stroke-opacity="0.35"/>${label}`;
  });
  const requests = placedRequests(marks, device, frame).map(({ mark }) =>
    write(x(mark.t) + 3, MARGIN.top + 12, `✕ ${formatBytes(mark.nbytes)}`)
  );
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${PICTURE.width}" height="${PICTURE.height}"`,
    ` font-family="sans-serif" font-size="13" fill="${text}">`,
    `<rect width="100%" height="100%" fill="${background}"/>`,
    write(MARGIN.left, 15, title),
    rule(0),
    rule(frame.top / 2),
    rule(frame.top),
    `<g transform="${place}"><path d="${path.area}" fill="${line}" opacity="0.15"/>`,
    `<path d="${path.line}" fill="none" stroke="${line}" stroke-width="1.5" vector-effect="non-scaling-stroke"/></g>`,
    ...cells,
    ...requests,
    ...times,
    '</svg>'
  ].join('');
}

/** Offer `content` as a file to save. */
export function save(content: Blob, name: string): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(content);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => {
    URL.revokeObjectURL(link.href);
  }, 10_000);
}

/** Draw an SVG document as a PNG, twice as fine as it says. */
export async function pngOf(svg: string): Promise<Blob> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement('canvas');
  canvas.width = 2 * PICTURE.width;
  canvas.height = 2 * PICTURE.height;
  canvas.getContext('2d')?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, fail) => {
    canvas.toBlob(blob => {
      if (blob === null) {
        fail(new Error('the browser made no picture'));
      } else {
        done(blob);
      }
    }, 'image/png');
  });
}

function escape(text: string): string {
  return text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;').replace(/"/g, '&quot;');
}
