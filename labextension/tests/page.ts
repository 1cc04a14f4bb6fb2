/** A page with a view in it, as far as jsdom has one: it lays nothing out, and so sees nothing come into its window. */

import { vi } from 'vitest';

import type { Host } from '../src/view/host';
import { render } from '../src/view/index';
import type { FakeModel } from './model';

/** Show a view of `model`. Returns its root and what takes it away. */
export function open(model: FakeModel, host: Host = {}): { root: HTMLElement; close: () => void } {
  vi.stubGlobal(
    'IntersectionObserver',
    class {
      observe(): void {
        // never called back
      }
      disconnect(): void {
        // nothing to end
      }
    }
  );
  const el = document.createElement('div');
  document.body.append(el);
  const close = render({ model, el }, host);
  const root = el.querySelector<HTMLElement>('.nbguard-view');
  if (root === null) {
    throw new Error('nothing was shown');
  }
  return {
    root,
    close: () => {
      close();
      el.remove();
    }
  };
}

/** Whether `node` is on the page: neither it nor what it is in is hidden. */
export function isShown(node: Element): boolean {
  return node.isConnected && node.closest('[hidden]') === null;
}

/** The button, menu item or box that a screen reader calls by a name that starts so. */
export function control(root: HTMLElement, name: string): HTMLElement {
  const found = [...root.querySelectorAll<HTMLElement>('button, input')].find(
    node => isShown(node) && (node.getAttribute('aria-label') ?? node.textContent).startsWith(name)
  );
  if (found === undefined) {
    throw new Error(`no control is called ${name}`);
  }
  return found;
}

/** The headings that can be seen. */
export function headings(root: HTMLElement): string[] {
  return [...root.querySelectorAll('h3')].filter(isShown).map(node => node.textContent);
}
