/** Who else takes memory: the other notebooks of this server, each a way to it, and processes elsewhere on this kernel's devices. */

import { formatBytes } from './bytes';
import { button, cut, element, show } from './dom';
import type { Host, OtherNotebook } from './host';
import type { Tick } from './protocol';
import type { Trans } from './words';

/** `isHere`: this server has the notebook, so there is a way to it. */
type Item = OtherNotebook & { isHere: boolean };

export class Neighbours {
  readonly node = element('div', 'neighbours dim wrap');
  #drawn = '';

  readonly #trans: Trans;
  readonly #host: Host;

  constructor(trans: Trans, host: Host) {
    this.#trans = trans;
    this.#host = host;
    show(this.node, false);
  }

  update(tick: Tick): void {
    const notebooks = this.#notebooks(tick);
    const elsewhere = notebooks.length > 0 ? this.#elsewhere(tick) : '';
    const text = JSON.stringify([notebooks, elsewhere]);
    if (text === this.#drawn) {
      return;
    }
    this.#drawn = text;
    show(this.node, notebooks.length > 0);
    const items = notebooks.flatMap((each, i) => [i === 0 ? ' ' : ', ', ...this.#item(each)]);
    this.node.replaceChildren(this.#trans.__('Other notebooks:'), ...items, ...(elsewhere === '' ? [] : [`, ${elsewhere}`]));
  }

  /** The others that are known by name, by this server or by their processes: what they say, else what the driver says of them. */
  #notebooks({ neighbours }: Tick): Item[] {
    const others = (this.#host.others?.() ?? []).map(each => ({ ...each, isHere: true }));
    const named = neighbours.filter(([, kernel]) => kernel !== '').flatMap(([, kernel, told, nbytes]) => {
      const here = this.#host.nameOf?.(kernel) ?? null;
      const name = here ?? told;
      return name === '' ? [] : [{ kernel, name, nbytes, isHere: here !== null }];
    });
    const isNew = ({ kernel }: Item): boolean => !named.some(each => each.kernel === kernel);
    return [...named, ...others.filter(isNew)].sort((a, b) => (b.nbytes ?? 0) - (a.nbytes ?? 0));
  }

  #item({ kernel, name, nbytes, isHere }: Item): (Node | string)[] {
    const size = nbytes === null ? '' : formatBytes(nbytes);
    const { goToNotebook } = this.#host;
    if (goToNotebook === undefined || !isHere) {
      return [`${cut(name, 60)} ${size}`];
    }
    const link = button('link', cut(name, 60), () => {
      goToNotebook(kernel);
    });
    link.setAttribute('aria-label', this.#trans.__('go to %1', name));
    return [link, ` ${size}`];
  }

  #elsewhere({ neighbours }: Tick): string {
    const others = neighbours.filter(([, kernel, name]) => kernel === '' || (this.#host.nameOf?.(kernel) ?? name) === '');
    const rest = others.filter(([, , name]) => name === '');
    const named = others.filter(([, , name]) => name !== '').map(([, , name, nbytes]) => `${cut(name, 60)} ${formatBytes(nbytes)}`);
    if (rest.length === 0) {
      return named.join(', ');
    }
    const nbytes = rest.some(([, , , each]) => each === null) ? null : rest.reduce((sum, [, , , each]) => sum + (each ?? 0), 0);
    const count = rest.length === 1 ? this.#trans.__('1 other process') : this.#trans.__('%1 other processes', rest.length);
    return [...named, `${count} ${formatBytes(nbytes)}`].join(', ');
  }
}
