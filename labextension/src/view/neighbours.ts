/** Who else is on the devices of this kernel: notebooks by their names where the host knows them, processes elsewhere. */

import { formatBytes } from './bytes';
import type { Host } from './host';
import type { Tick } from './protocol';
import type { Trans } from './words';

/** `Others: b.ipynb 1.76 GiB, 1 other process 0.20 GiB`; empty where no notebook is known by name. */
export function neighbourWords({ neighbours }: Tick, nameOf: Host['nameOf'], trans: Trans): string {
  const named = neighbours.map(([, kernel, nbytes]) => ({ name: kernel === '' ? null : (nameOf?.(kernel) ?? null), nbytes }));
  const known = named.filter(each => each.name !== null);
  if (known.length === 0) {
    return '';
  }
  const rest = named.filter(each => each.name === null);
  const words = known.map(({ name, nbytes }) => `${name ?? ''} ${formatBytes(nbytes)}`);
  if (rest.length > 0) {
    const nbytes = rest.some(each => each.nbytes === null) ? null : rest.reduce((sum, each) => sum + (each.nbytes ?? 0), 0);
    const count = rest.length === 1 ? trans.__('1 other process') : trans.__('%1 other processes', rest.length);
    words.push(`${count} ${formatBytes(nbytes)}`);
  }
  return trans.__('Others: %1', words.join(', '));
}
