/** The rows of the list of holders: those of `%gpumem`, with their parts under them; they add up to the total. */

import type { Experiment, HolderRow, MemoryState } from './protocol';
import { formatBytes } from './bytes';
import { join, type Trans } from './words';

/** A line of the list. Lines under it are part of its bytes. */
export interface Entry {
  /** Tells it from others as long as it is listed. */
  key: string;
  name: string;
  /** The way to the memory, or what it is, in a few words. */
  words: string;
  /** Bytes that its release gives back; of shared memory those that go with the last of its holders. */
  nbytes: number;
  /** Bytes of these that Clean stale gives back. */
  stale: number;
  /** Of an experiment; empty: it is none. */
  state: Experiment['state'] | '';
  atLeast: boolean;
  /** One of those that share a line. */
  isSmall: boolean;
  cell: number | null;
  /** What requests name; null: nothing can be asked about it. */
  target: { id: number | null; label: string; can: Experiment['can'] } | null;
  children: readonly Entry[];
}

/** The entries of a scan. `training` names the Learner that a fit runs on now. */
export function entriesOf(heap: MemoryState, training: string | null, trans: Trans): Entry[] {
  const isNamed = new Set(heap.holders.map(row => row.device)).size > 1;
  const ofHolder = (row: HolderRow): Entry => ofRow(row, heap, training, isNamed, trans);
  const entries = heap.holders.map(ofHolder);
  const running = entries.filter((_, i) => heap.holders[i]?.is_running);
  const rest = entries.filter(entry => !running.includes(entry));
  const parked = heap.experiments.filter(({ state, label }) => state === 'parked' && !heap.holders.some(row => row.label === label));
  const small = rest.filter(entry => entry.isSmall);
  const folded = small.length > 1 ? small : [];
  return [
    ...rest.filter(entry => !folded.includes(entry)),
    ...parked.map(experiment => ofParked(experiment)),
    ...fold('frames', running, framesWords(running.length, trans), trans.__('freed when that code ends')),
    ...fold('small', folded, trans.__('%1 small holders', folded.length), '')
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
  heap: MemoryState,
  training: string | null,
  isNamed: boolean,
  trans: Trans
): Entry {
  const inside = heap.experiments.filter(experiment => experiment.id === row.id || experiment.label === row.label);
  const itself = inside.find(({ can, label }) => can.includes('release') || can.includes('unpark') || label === row.label);
  const isPath = row.path !== '' && row.path.startsWith(row.label);
  const what = itself === undefined ? row.what : join([row.what, itself.state === 'parked' ? itself.note : '']);
  return {
    key: `${row.device}\n${row.path}\n${row.label}`,
    name: row.short || (isPath ? row.path : row.label),
    words: join([row.at_least ? trans.__('at least') : '', withOthers(row, trans), row.note || what, isPath && row.short === '' ? '' : row.path, isNamed ? row.device : '']),
    nbytes: row.nbytes,
    stale: row.stale_bytes,
    state: itself === undefined ? '' : stateOf(itself, training),
    atLeast: row.at_least,
    isSmall: row.is_small && itself?.state !== 'training',
    cell: row.cell,
    target: { id: row.id, label: row.label, can: abilities(row, itself) },
    children: [
      ...row.parts.map(([label, nbytes]) => plain(`part ${label}`, label, nbytes)),
      ...inside.filter(each => each !== itself && each.label !== row.label).map(each => note(each))
    ]
  };
}

/** What can be asked of a row; what is parked under its name can be brought back. */
function abilities(row: HolderRow, itself: Experiment | undefined): Experiment['can'] {
  return itself?.state === 'parked' ? [...row.can.filter(each => each === 'why'), 'unpark'] : row.can;
}

/** What a release takes along, and the bytes that it gives back, where these are not the row's own. */
function withOthers(row: HolderRow, trans: Trans): string {
  if (row.together.length > 0) {
    return trans.__('with %1: %2', row.together.join(', '), formatBytes(row.frees));
  }
  return row.frees > row.nbytes ? trans.__('with its stale memory: %1', formatBytes(row.frees)) : '';
}

/** An experiment inside of a holder: `last error → fit → self`. Its bytes are among the holder's. */
function note(experiment: Experiment): Entry {
  return { ...plain(`in ${experiment.label}`, experiment.label, -1), words: experiment.summary };
}

function plain(key: string, name: string, nbytes: number): Entry {
  return { key, name, words: '', nbytes, stale: 0, state: '', atLeast: false, isSmall: false, cell: null, target: null, children: [] };
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
