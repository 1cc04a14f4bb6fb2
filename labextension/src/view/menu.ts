/** A button that opens a menu, by mouse and by keyboard. */

import { button, element } from './dom';

export class Menu {
  readonly node = element('div', 'menu');
  readonly #toggle: HTMLButtonElement;
  readonly #list = element('ul', 'menu-list');
  readonly #items: HTMLButtonElement[];

  constructor(label: string, entries: readonly [string, () => void][]) {
    this.#toggle = button('more', '⋯', () => {
      this.#set(this.#list.hidden);
    });
    this.#toggle.setAttribute('aria-label', label);
    this.#toggle.setAttribute('aria-haspopup', 'menu');
    this.#toggle.title = label;
    this.#list.setAttribute('role', 'menu');
    this.#list.setAttribute('aria-label', label);
    this.#items = entries.map(([text, act]) => this.#item(text, act));
    this.node.append(this.#toggle, this.#list);
    this.node.addEventListener('keydown', event => {
      this.#onKey(event);
    });
    this.node.addEventListener('focusout', event => {
      if (!(event.relatedTarget instanceof Node && this.node.contains(event.relatedTarget))) {
        this.#set(false);
      }
    });
    this.#set(false);
  }

  #item(text: string, act: () => void): HTMLButtonElement {
    const item = button('menu-item', text, () => {
      this.#toggle.focus();
      this.#set(false);
      act();
    });
    item.setAttribute('role', 'menuitem');
    item.tabIndex = -1;
    const holder = element('li', '', item);
    holder.setAttribute('role', 'none');
    this.#list.append(holder);
    return item;
  }

  #set(open: boolean): void {
    this.#list.hidden = !open;
    this.#toggle.setAttribute('aria-expanded', String(open));
    if (open) {
      this.#items[0]?.focus();
    }
  }

  #onKey(event: KeyboardEvent): void {
    if (this.#list.hidden) {
      if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
        this.#take(event);
        this.#set(true);
      }
      return;
    }
    const at = this.#items.findIndex(item => item === document.activeElement);
    const last = this.#items.length - 1;
    const to: Record<string, number> = {
      ArrowDown: at === last ? 0 : at + 1,
      ArrowUp: at <= 0 ? last : at - 1,
      Home: 0,
      End: last
    };
    const next = to[event.key];
    if (event.key === 'Escape') {
      this.#take(event);
      this.#toggle.focus();
      this.#set(false);
    } else if (next !== undefined) {
      this.#take(event);
      this.#items[next]?.focus();
    }
  }

  #take(event: KeyboardEvent): void {
    event.preventDefault();
    event.stopPropagation();
  }
}
