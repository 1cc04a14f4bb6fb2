/** The sentences that are made of figures, and how sentences are translated. */

import { formatBytes } from './bytes';
import type { Host } from './host';
import type { DeviceTick, FitTick, Tick } from './protocol';

/**
 * The reader's language, as JupyterLab has it: the tools that collect sentences for translators look for `trans.__('…')`.
 * `%1`, `%2` … stand for `args`.
 */
export type Trans = NonNullable<Host['trans']>;

/** The sentence as it is, with its figures. */
export const english: Trans = {
  __: (text, ...args) => text.replace(/%(\d+)/g, (whole, i: string) => String(args[Number(i) - 1] ?? whole))
};

export type Tone = 'idle' | 'busy' | 'silent' | 'none';

/** What the kernel does now, in a few words; `silent`: it says nothing although it was asked to. */
export function status(tick: Tick, silent: boolean, trans: Trans): [Tone, string] {
  if (silent) {
    return ['silent', trans.__('kernel not responding')];
  }
  if (tick.fit !== null) {
    return ['busy', trans.__('training')];
  }
  if (tick.busy) {
    return ['busy', tick.cell === null ? trans.__('cell running') : trans.__('%1 runs', cell(tick.cell))];
  }
  return ['idle', trans.__('idle')];
}

export function cell(number: number): string {
  return `In[${number}]`;
}

/** Which device the figures are of: `cuda:0 · H100`, or how many there are. */
export function headline(tick: Tick, trans: Trans): string {
  const [first, ...others] = tick.devices;
  if (first === undefined) {
    return '';
  }
  return others.length ? trans.__('%1 devices', tick.devices.length) : deviceName(first);
}

export function deviceName(device: DeviceTick): string {
  return join([device.device, device.name.replace(/^NVIDIA /, '')]);
}

/** What to know before reading the figures; empty: nothing. */
export function caveat(tick: Tick, silent: boolean, trans: Trans): string {
  if (silent) {
    return trans.__('These figures are from before: the kernel is in native code that lets nothing else run, or has stopped.');
  }
  if (tick.tracked === '') {
    return trans.__('PyTorch is not imported yet. Figures appear once a cell imports it.');
  }
  if (tick.tracked === 'cpu') {
    return trans.__('No GPU in this process: CPU tensors are tracked.');
  }
  if (tick.tracked === 'simulated') {
    return trans.__('A simulated GPU: cells run on the CPU against a model of its memory. Holders are listed by their host memory.');
  }
  return '';
}

/** Where a fit is: `epoch 2 of 5 · batch 118 of 240 · loss 0.412`. */
export function fitProgress(fit: FitTick, trans: Trans): string {
  const batch = fit.is_training ? count(fit.batch, fit.batches, trans, 'batch') : trans.__('validating');
  return join([
    count(fit.epoch, fit.epochs, trans, 'epoch'),
    batch,
    fit.loss === null ? '' : trans.__('loss %1', figure(fit.loss))
  ]);
}

/** What a fit takes: its peak, and how much of the time it waits for data. */
export function fitCost(fit: FitTick, trans: Trans): string {
  return join([
    fit.peak === null ? '' : trans.__('peak %1', formatBytes(fit.peak)),
    fit.waiting === null ? '' : trans.__('waits %1 % of the time for data', Math.round(fit.waiting * 100))
  ]);
}

/** The share (0 to 1) of a fit that is done; null where its length is not known. */
export function fitShare(fit: FitTick): number | null {
  if (fit.epoch === null || fit.epochs === null || fit.epochs === 0) {
    return null;
  }
  const ofEpoch = !fit.is_training ? 1 : fit.batch === null || !fit.batches ? 0 : fit.batch / fit.batches;
  return Math.min(1, Math.max(0, (fit.epoch - 1 + ofEpoch) / fit.epochs));
}

/** `seconds` as `45 s` or `2 min`. */
export function duration(seconds: number, trans: Trans): string {
  return seconds < 90 ? trans.__('%1 s', Math.round(seconds)) : trans.__('%1 min', Math.round(seconds / 60));
}

/** Words as a sentence: a capital first, a full stop last. */
export function sentence(words: string): string {
  return words === '' ? '' : `${words.charAt(0).toUpperCase()}${words.slice(1)}${words.endsWith('.') ? '' : '.'}`;
}

/** The parts that are not empty, with a dot between them. */
export function join(parts: readonly string[]): string {
  return parts.filter(part => part !== '').join(' · ');
}

function count(at: number | null, of: number | null, trans: Trans, what: 'epoch' | 'batch'): string {
  if (at === null) {
    return '';
  }
  if (of === null) {
    return what === 'epoch' ? trans.__('epoch %1', at) : trans.__('batch %1', at);
  }
  return what === 'epoch' ? trans.__('epoch %1 of %2', at, of) : trans.__('batch %1 of %2', at, of);
}

function figure(value: number): string {
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 10_000) ? size.toExponential(2) : size.toPrecision(4);
  return value < 0 ? `−${text}` : text;
}
