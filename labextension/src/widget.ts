/** The view as an anywidget module, for `nbguard.Sidebar()` in an output cell. */

import type { HostState } from './view/host';
import { render, type Model } from './view/index';

/**
 * The widget's model, as long as its kernel is there. After a restart ipywidgets throws at each message: that is when the view
 * says that the kernel is gone, and sends nothing more.
 */
class WidgetModel implements Model {
  readonly #model: Model;
  readonly #listeners = new Set<() => void>();
  #host: HostState | undefined;

  constructor(model: Model) {
    this.#model = model;
  }

  get(name: 'tick' | 'heap' | 'host' | 'notebook'): unknown {
    return name === 'host' ? this.#host : this.#model.get(name);
  }

  on(event: string, act: (...args: never[]) => void): void {
    if (event === 'change:host') {
      this.#listeners.add(act);
    } else {
      this.#model.on(event as 'change:tick', act);
    }
  }

  off(event: string, act: (...args: never[]) => void): void {
    this.#listeners.delete(act);
    this.#model.off(event, act);
  }

  send(message: Parameters<Model['send']>[0]): void {
    if (this.#host !== undefined) {
      return;
    }
    try {
      this.#model.send(message);
    } catch {
      this.#host = { kind: 'gone' };
      this.#listeners.forEach(act => { act(); });
    }
  }
}

export default {
  render: ({ model, el }: { model: Model; el: HTMLElement }): (() => void) => render({ model: new WidgetModel(model), el })
};
