/** The fit that runs: how far it is and what it takes, and how it went on where memory ran out, also once it is over. */

import { element, nameElement, percent, sentenceElement, setAttribute, setName, setText, show } from './dom';
import type { FitTick, Tick } from './protocol';
import { fitCost, fitProgress, fitShare, sentence, type Trans } from './words';

export class FitSection {
  readonly node = element('section', 'section');
  readonly #call = nameElement('div', 'code');
  readonly #progress = element('div');
  readonly #track = element('div', 'progress');
  readonly #done = element('i');
  readonly #cost = element('div', 'dim');
  readonly #running = element('div', '', this.#call, this.#progress, this.#track, this.#cost);
  readonly #survived = element('div');
  #drawnSurvived = '';

  readonly #trans: Trans;

  constructor(trans: Trans) {
    this.#trans = trans;
    this.#track.append(this.#done);
    this.#track.setAttribute('role', 'progressbar');
    this.#track.setAttribute('aria-label', trans.__('The fit'));
    const title = element('h3', 'title', trans.__('Fit'));
    this.node.append(title, this.#running, this.#survived);
  }

  update({ fit, survived }: Tick): void {
    show(this.node, fit !== null || survived.length > 0);
    show(this.#running, fit !== null);
    const drawn = JSON.stringify(survived);
    if (drawn !== this.#drawnSurvived) {
      this.#drawnSurvived = drawn;
      this.#survived.replaceChildren(...survived.map(each => sentenceElement('div', sentence(each))));
    }
    if (fit !== null) {
      this.#draw(fit);
    }
  }

  #draw(fit: FitTick): void {
    setName(this.#call, fit.label === '' ? fit.call : `${fit.label}.${fit.call}`);
    setText(this.#progress, fitProgress(fit, this.#trans));
    setText(this.#cost, fitCost(fit, this.#trans));
    const share = fitShare(fit);
    show(this.#track, share !== null);
    setAttribute(this.#track, 'aria-valuenow', share === null ? null : String(Math.round(share * 100)));
    this.#done.style.width = percent(share ?? 0);
  }
}
