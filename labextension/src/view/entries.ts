/** The rows of the list of holders: experiments with their parts under them, then loose names; they add up to the total. */

import type { Experiment, HolderRow, MemoryState } from './protocol';
import { join, type Trans } from './words';

/** A line of the list. Lines under it are part of its bytes. */
export interface Entry {
  /** Tells it from others as long as it is listed. */
  key: string;
  name: string;
  /** The way to the memory, or what it is, in a few words. */
  words: string;
  /** Bytes, those of the lines under it included. */
  nbytes: number;
  /** Bytes of these that Clean stale gives back. */
  stale: number;
  /** Of an experiment; empty: it is none. */
  state: Experiment['state'] | '';
  atLeast: boolean;
  cell: number | null;
  /** What requests name; null: nothing can be asked about it. */
  target: { id: number | null; label: string; can: Experiment['can'] } | null;
  children: readonly Entry[];
}

/** The entries of a scan. `training` names the Learner that a fit runs on now. */
export function entriesOf(heap: MemoryState, training: string | null, trans: Trans): Entry[] {
  const listed = new Set(heap.holders.map(row => row.id));
  const shared = new Map<number, HolderRow[]>();
  const top: HolderRow[] = [];
  for (const row of heap.holders) {
    if (row.parent === null || !listed.has(row.parent)) {
      top.push(row);
    } else {
      shared.set(row.parent, [...(shared.get(row.parent) ?? []), row]);
    }
  }
  const isNamed = new Set(heap.holders.map(row => row.device)).size > 1;
  const entries = top.map(row => ofRow(row, shared.get(row.id) ?? [], heap, training, isNamed, trans));
  const running = entries.filter((_, i) => top[i]?.is_running);
  const rest = entries.filter(entry => !running.includes(entry));
  const parked = heap.experiments.filter(({ state, label }) => state === 'parked' && !top.some(row => row.label === label));
  const empty = rest.filter(entry => entry.nbytes === 0 && entry.stale === 0 && entry.state === '');
  const folded = empty.length > 1 ? empty : [];
  return [
    ...rest.filter(entry => !folded.includes(entry)),
    ...parked.map(experiment => ofParked(experiment)),
    ...fold('frames', running, framesWords(running.length, trans), trans.__('freed when that code ends')),
    ...fold('empty', folded, trans.__('%1 names', folded.length), trans.__('all they lead to is listed under other names'))
  ];
}

/** The bytes of `entries`. */
export function sumOf(entries: readonly Entry[]): number {
  return entries.reduce((sum, entry) => sum + entry.nbytes, 0);
}

function framesWords(count: number, trans: Trans): string {
  return count === 1 ? trans.__('1 frame of the running cell') : trans.__('%1 frames of the running cell', count);
}

function ofRow(
  row: HolderRow,
  shared: readonly HolderRow[],
  heap: MemoryState,
  training: string | null,
  isNamed: boolean,
  trans: Trans
): Entry {
  const inside = heap.experiments.filter(experiment => experiment.id === row.id || experiment.label === row.label);
  const itself = inside.find(({ can, label }) => can.includes('release') || can.includes('unpark') || label === row.label);
  const isPath = row.path !== '' && row.path.startsWith(row.label);
  const own = ownParts(row, shared.length > 0, trans);
  const what = itself === undefined ? row.what : join([row.what, itself.state === 'parked' ? itself.note : '']);
  const words = row.kind === 'shared' ? trans.__('freed when none of them holds it') : what;
  return {
    key: `${row.device}\n${row.path}\n${row.label}`,
    name: row.short || (isPath ? row.path : row.label),
    words: join([row.at_least ? trans.__('at least') : '', row.note || words, isPath && row.short === '' ? '' : row.path, isNamed ? row.device : '']),
    nbytes: shared.reduce((sum, each) => sum + each.nbytes, row.nbytes),
    stale: shared.reduce((sum, each) => sum + each.stale_bytes, row.stale_bytes),
    state: itself === undefined ? '' : stateOf(itself, training),
    atLeast: row.at_least,
    cell: row.cell,
    target: { id: row.id, label: row.label, can: abilities(row, itself) },
    children: [
      ...own,
      ...shared.map(each => ofShared(each, trans)),
      ...inside.filter(each => each !== itself && each.label !== row.label).map(each => note(each))
    ]
  };
}

/** What can be asked of a row; what is parked under its name can be brought back. */
function abilities(row: HolderRow, itself: Experiment | undefined): Experiment['can'] {
  return itself?.state === 'parked' ? [...row.can.filter(each => each === 'why'), 'unpark'] : row.can;
}

function ownParts(row: HolderRow, isShared: boolean, trans: Trans): Entry[] {
  if (row.parts.length > 0) {
    return row.parts.map(([label, nbytes]) => plain(`part ${label}`, label, nbytes));
  }
  return isShared && row.nbytes > 0 ? [plain('own', trans.__('held by it alone'), row.nbytes)] : [];
}

function ofShared(row: HolderRow, trans: Trans): Entry {
  const name = row.others.length > 0 ? trans.__('shared with %1', row.others.join(', ')) : row.label;
  return { ...plain(`shared ${row.label}`, name, row.nbytes), stale: row.stale_bytes, atLeast: row.at_least };
}

/** An experiment inside of a holder: `last error → fit → self`. Its bytes are among the holder's. */
function note(experiment: Experiment): Entry {
  return { ...plain(`in ${experiment.label}`, experiment.label, -1), words: experiment.summary };
}

function plain(key: string, name: string, nbytes: number): Entry {
  return { key, name, words: '', nbytes, stale: 0, state: '', atLeast: false, cell: null, target: null, children: [] };
}

function ofParked({ label, note, cell, can }: Experiment): Entry {
  const target = { id: null, label, can };
  return { ...plain(`parked ${label}`, label, 0), words: note, state: 'parked', cell, target };
}

function stateOf({ label, state }: Experiment, training: string | null): Experiment['state'] {
  if (state === 'training' && training === null) {
    return 'live';
  }
  return state === 'live' && label === training ? 'training' : state;
}

/** One entry for several: nothing for none. */
function fold(key: string, entries: readonly Entry[], name: string, words: string): Entry[] {
  return entries.length === 0 ? [] : [{ ...plain(key, name, sumOf(entries)), words, children: entries }];
}
