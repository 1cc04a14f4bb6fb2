/** The memory of a Learner's next fit, under its row. */

import { element } from './dom';
import type { ForeseenView } from './protocol';

export function foreseen(fit: ForeseenView): HTMLElement {
  const lines = [fit.answer, ...fit.notes].map(text => element('div', 'nbguard-dim', text));
  return element('div', '', element('div', '', fit.need), ...lines);
}
