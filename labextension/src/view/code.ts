/** A line of code to copy. */

import { button, element } from './dom';
import type { Trans } from './words';

const SAYS_FOR = 2000;

export function codeLine(source: string, trans: Trans): HTMLElement {
  const code = element('code', 'source', source);
  const copy = button('link', trans.__('copy'), () => {
    void copyFrom(code).then(copied => {
      copy.textContent = copied ? trans.__('copied') : trans.__('press Ctrl+C');
      setTimeout(() => {
        copy.textContent = trans.__('copy');
      }, SAYS_FOR);
    });
  });
  copy.setAttribute('aria-label', trans.__('copy %1', source));
  return element('div', 'line', code, copy);
}

/** Copy the text of `node`. Where the page may not (no https), select it for the reader to copy. */
async function copyFrom(node: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(node.textContent);
    return true;
  } catch {
    window.getSelection()?.selectAllChildren(node);
    return false;
  }
}
