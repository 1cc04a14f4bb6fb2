/** Elements, and changing them only where they differ: what the reader selects, hovers or focuses stays as it is. */

const LONGEST_TEXT = 200;
const LAST_LETTERS = 8;
const LONGEST_TITLE = 500;

/** A new element with classes (`names` without our prefix; empty: none) and children. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  names = '',
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  if (names !== '') {
    setClass(node, names);
  }
  node.append(...children);
  return node;
}

/** Give `node` these classes and no others. Their prefix, which keeps a host's styles away, is written here alone. */
export function setClass(node: Element, names: string): void {
  setAttribute(node, 'class', names.replace(/\S+/g, 'nbguard-$&'));
}

/** A share as a length. */
export function percent(share: number): string {
  return `${(share * 100).toFixed(2)}%`;
}

export function setText(node: Node, text: string): void {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** Give `node` an attribute, or take it away (null). */
export function setAttribute(node: Element, name: string, value: string | null): void {
  if (value === null) {
    node.removeAttribute(name);
  } else if (node.getAttribute(name) !== value) {
    node.setAttribute(name, value);
  }
}

export function show(node: HTMLElement, shown: boolean): void {
  if (node.hidden === shown) {
    node.hidden = !shown;
  }
}

/** An element for text that comes from the user's program: it keeps its direction to itself and says in full what it cut. */
export function nameElement<K extends keyof HTMLElementTagNameMap>(tag: K, names: string): HTMLElementTagNameMap[K] {
  const node = element(tag, `name ${names}`);
  node.dir = 'auto';
  return node;
}

export function setName(node: HTMLElement, text: string): void {
  if (node.classList.contains('nbguard-two-ends')) {
    setEnds(node, cut(text, LONGEST_TEXT));
  } else {
    setText(node, cut(text, LONGEST_TEXT));
  }
  setAttribute(node, 'title', text === '' ? null : cut(text, LONGEST_TITLE));
}

/** Write `text` so that its end stays where there is no room for all of it: an ellipsis stands before its last letters. */
function setEnds(node: HTMLElement, text: string): void {
  if (node.textContent === text && node.firstElementChild !== null) {
    return;
  }
  // Other scripts may not be cut anywhere, and may run from right to left.
  const isLatin = text.length > LAST_LETTERS + 4 && /^[ -~→…·]*$/.test(text);
  const last = isLatin ? (/[ -~]*$/.exec(text.slice(-LAST_LETTERS))?.[0].length ?? 0) : 0; // no arrow: fonts differ in its width
  const at = text.length - last;
  node.style.setProperty('--tail', `${last}ch`);
  const parts = [text.slice(0, at), text.slice(at)].filter(part => part !== '');
  node.replaceChildren(...parts.map(part => element('span', '', part)));
}

/** `text`, at most `longest` characters of it: a name can be 10 kB long. */
export function cut(text: string, longest = LONGEST_TEXT): string {
  return text.length > longest ? `${text.slice(0, longest)}…` : text;
}

/** A sentence with `code` between backticks. */
export function setSentence(node: HTMLElement, sentence: string): void {
  if (node.dataset.sentence === sentence) {
    return;
  }
  node.dataset.sentence = sentence;
  node.replaceChildren(...sentence.split('`').map((part, i) => (i % 2 ? element('code', '', part) : part)));
}

/** A new element with a sentence that may take several lines. */
export function sentenceElement(tag: 'div' | 'span', sentence: string): HTMLElement {
  const node = element(tag, 'wrap');
  setSentence(node, sentence);
  return node;
}

/** A button. It is switched off by `aria-disabled`, which leaves the focus where it is. */
export function button(names: string, text: string, act: () => void): HTMLButtonElement {
  const node = element('button', `button ${names}`, text);
  node.type = 'button';
  node.addEventListener('click', () => {
    if (node.getAttribute('aria-disabled') !== 'true') {
      act();
    }
  });
  return node;
}

export function setEnabled(node: HTMLButtonElement, enabled: boolean): void {
  setAttribute(node, 'aria-disabled', enabled ? null : 'true');
}

/** A setter of the label of a picture that changes all the time: at most every 10 s, so that nobody has to listen to it. */
export function slowLabel(node: Element): (label: string) => void {
  let next = 0;
  return label => {
    const now = Date.now();
    if (now >= next) {
      next = now + 10_000;
      setAttribute(node, 'aria-label', label);
    }
  };
}

/** One item's part of the page. */
export interface ItemView<T> {
  readonly node: HTMLElement;
  update(item: T): void;
  /** Called when the item is gone. */
  close?(): void;
}

/** The children of `parent` (those after `first`, if given), one per item; an item that stays keeps its element. */
export class KeyedList<T> {
  #views = new Map<string, ItemView<T>>();

  readonly #parent: HTMLElement;
  readonly #key: (item: T) => string;
  readonly #make: () => ItemView<T>;
  readonly #first: Element | null;

  constructor(
    parent: HTMLElement,
    key: (item: T) => string,
    make: () => ItemView<T>,
    first: Element | null = null
  ) {
    this.#parent = parent;
    this.#key = key;
    this.#make = make;
    this.#first = first;
  }

  update(items: readonly T[]): void {
    const focused = document.activeElement;
    const views = new Map<string, ItemView<T>>();
    for (const item of items) {
      const key = unused(views, this.#key(item));
      const view = this.#views.get(key) ?? this.#make();
      view.update(item);
      views.set(key, view);
    }
    for (const [key, view] of this.#views) {
      if (!views.has(key)) {
        view.node.remove();
        view.close?.();
      }
    }
    this.#views = views;
    this.#arrange();
    if (focused instanceof HTMLElement && focused !== document.activeElement && this.#parent.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  }

  #arrange(): void {
    let next = this.#first === null ? this.#parent.firstElementChild : this.#first.nextElementSibling;
    for (const { node } of this.#views.values()) {
      if (node === next) {
        next = node.nextElementSibling;
      } else {
        this.#parent.insertBefore(node, next);
      }
    }
  }
}

function unused(taken: ReadonlyMap<string, unknown>, key: string): string {
  let free = key;
  for (let i = 2; taken.has(free); i++) {
    free = `${key}\n${i}`;
  }
  return free;
}
