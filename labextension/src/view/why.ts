/** The ways in which something is kept alive, under its row, each with the line that cuts it. */

import { codeLine } from './code';
import type { ViewContext } from './view_context';
import { element, nameElement, setName } from './dom';
import type { WhyView } from './protocol';
import { cell, join } from './words';

export function ways(why: WhyView, trans: ViewContext['trans']): HTMLElement {
  const list = element('ol', 'ways');
  for (const [path, number, stale, cut, effect] of why.paths) {
    const name = nameElement('div', 'code wrap');
    setName(name, path);
    const item = element('li', '', name);
    const facts = element('div', 'dim', join([number === null ? '' : cell(number), effect]));
    if (stale) {
      facts.append(' ', element('span', 'chip warn', trans.__('stale')));
    }
    if (facts.hasChildNodes()) {
      item.append(facts);
    }
    if (cut !== '') {
      item.append(codeLine(cut, trans));
    }
    list.append(item);
  }
  for (const [root, count] of why.more) {
    const words = count === 1 ? trans.__('1 more path') : trans.__('%1 more paths', count);
    list.append(element('li', 'dim', join([root, words])));
  }
  return list;
}
