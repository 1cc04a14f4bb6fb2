/** The view of a kernel's GPU memory, for any host that can give it a model: JupyterLab's panel, or anywidget. */

import type { Host, Model } from './host';
import { View } from './view';

export type { Host, HostState, Model } from './host';
export type { Answer, MemoryState, Request, Tick } from './protocol';

/** Show the view in `el`. Returns what takes it away again. */
export function render({ model, el }: { model: Model; el: HTMLElement }, host: Host = {}): () => void {
  const view = new View(model, host);
  el.append(view.node);
  view.open();
  return () => {
    view.close();
  };
}
