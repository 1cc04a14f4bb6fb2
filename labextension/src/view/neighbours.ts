/** Who else takes memory: the other notebooks of this server, each a way to it, and processes elsewhere on this kernel's devices. */

import { formatBytes } from './bytes';
import { button, cut, element, show } from './dom';
import type { Host, OtherNotebook } from './host';
import type { Tick } from './protocol';
import type { Trans } from './words';

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

  /** The others that are known by name: by what they say themselves, else by what the driver says of this kernel's devices. */
  #notebooks({ neighbours }: Tick): OtherNotebook[] {
    const others = this.#host.others?.() ?? [];
    const named = neighbours.flatMap(([, kernel, nbytes]) => {
      const name = kernel === '' ? null : (this.#host.nameOf?.(kernel) ?? null);
      return name === null ? [] : [{ kernel, name, nbytes }];
    });
    const isNew = ({ kernel }: OtherNotebook): boolean => !named.some(each => each.kernel === kernel);
    return [...named, ...others.filter(isNew)].sort((a, b) => (b.nbytes ?? 0) - (a.nbytes ?? 0));
  }

  #item({ kernel, name, nbytes }: OtherNotebook): (Node | string)[] {
    const size = nbytes === null ? '' : formatBytes(nbytes);
    const { goToNotebook } = this.#host;
    if (goToNotebook === undefined) {
      return [`${cut(name, 60)} ${size}`];
    }
    const link = button('link', cut(name, 60), () => {
      goToNotebook(kernel);
    });
    link.setAttribute('aria-label', this.#trans.__('go to %1', name));
    return [link, ` ${size}`];
  }

  #elsewhere({ neighbours }: Tick): string {
    const rest = neighbours.filter(([, kernel]) => kernel === '' || (this.#host.nameOf?.(kernel) ?? null) === null);
    if (rest.length === 0) {
      return '';
    }
    const nbytes = rest.some(each => each[2] === null) ? null : rest.reduce((sum, each) => sum + (each[2] ?? 0), 0);
    const count = rest.length === 1 ? this.#trans.__('1 other process') : this.#trans.__('%1 other processes', rest.length);
    return `${count} ${formatBytes(nbytes)}`;
  }
}
