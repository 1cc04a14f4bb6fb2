/** The fit that runs: how far it is and what it takes. */

import { element, nameElement, percent, setAttribute, setName, setText, show } from './dom';
import type { FitTick } from './protocol';
import { fitCost, fitProgress, fitShare, type Trans } from './words';

export class FitSection {
  readonly node = element('section', 'section');
  readonly #call = nameElement('div', 'code');
  readonly #progress = element('div');
  readonly #track = element('div', 'progress');
  readonly #done = element('i');
  readonly #cost = element('div', 'dim');

  readonly #trans: Trans;

  constructor(trans: Trans) {
    this.#trans = trans;
    this.#track.append(this.#done);
    this.#track.setAttribute('role', 'progressbar');
    this.#track.setAttribute('aria-label', trans.__('The fit'));
    const title = element('h3', 'title', trans.__('Fit'));
    this.node.append(title, this.#call, this.#progress, this.#track, this.#cost);
  }

  update(fit: FitTick | null): void {
    show(this.node, fit !== null);
    if (fit === null) {
      return;
    }
    setName(this.#call, fit.label === '' ? fit.call : `${fit.label}.${fit.call}`);
    setText(this.#progress, fitProgress(fit, this.#trans));
    setText(this.#cost, fitCost(fit, this.#trans));
    const share = fitShare(fit);
    show(this.#track, share !== null);
    setAttribute(this.#track, 'aria-valuenow', share === null ? null : String(Math.round(share * 100)));
    this.#done.style.width = percent(share ?? 0);
  }
}
