import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';
import { Panel } from '@lumino/widgets';

import { isObject } from './view/check';
import { KernelSender } from './kernel_sender';

type Renderer = ReturnType<NotebookPanel['content']['rendermime']['createRenderer']>;
type MimeModel = Parameters<Renderer['renderModel']>[0];

/** The output of `nbguard.Sidebar()`: `{ model_id }` of the widget, beside its view and its picture in HTML. */
const SIDEBAR = 'application/vnd.nbguard.sidebar+json';
const WIDGET = 'application/vnd.jupyter.widget-view+json';
const HTML = 'text/html';
const WIDGETS = 'jupyter.widget';

/** Before ipywidgets' own renderer, which has nothing to show for a widget that is no more. */
const RANK = -20;

/** Shows the outputs of `nbguard.Sidebar()` live while their kernel has the widget, and their saved picture otherwise. */
export class SavedSidebars {
  /** Have a new notebook's outputs shown so: what a document registry calls an extension of a widget. */
  createNew(notebook: NotebookPanel): { isDisposed: boolean; dispose(): void } {
    const { rendermime } = notebook.content;
    rendermime.addFactory(
      { safe: false, mimeTypes: [SIDEBAR], createRenderer: () => new SidebarOutput(notebook) },
      RANK
    );
    return { isDisposed: false, dispose: () => { rendermime.removeMimeType(SIDEBAR); } };
  }
}

class SidebarOutput extends Panel {
  constructor(notebook: NotebookPanel) {
    super();
    this.#notebook = notebook;
    notebook.sessionContext.kernelChanged.connect(this.#onKernel, this);
    notebook.sessionContext.connectionStatusChanged.connect(this.#onKernel, this);
  }

  async renderModel(model: MimeModel): Promise<void> {
    this.#model = model;
    this.#shown = '';
    await this.#choose();
  }

  /** Show what there is now. A view that is live stays: it says itself when its kernel is gone. */
  async #choose(): Promise<void> {
    const kernel = this.#notebook.sessionContext.session?.kernel;
    const type = kernel && (await this.#isIn(kernel)) ? WIDGET : HTML;
    if (this.#model === null || this.isDisposed || this.#shown === type || this.#shown === WIDGET) {
      return;
    }
    this.#shown = type;
    for (const former of [...this.widgets]) {
      former.dispose();
    }
    const renderer = this.#notebook.content.rendermime.createRenderer(type);
    this.addWidget(renderer);
    await renderer.renderModel(this.#model);
  }

  /** Whether a kernel has the widget. Asked on the control channel, as the cell that shows it may still run. */
  async #isIn(kernel: Kernel.IKernelConnection): Promise<boolean> {
    const data = this.#model?.data[SIDEBAR];
    try {
      const comms = await new KernelSender(kernel, () => 'control').comms(WIDGETS);
      return isObject(data) && typeof data.model_id === 'string' && data.model_id in comms;
    } catch {
      return false;
    }
  }

  readonly #onKernel = (): void => {
    void this.#choose();
  };

  readonly #notebook: NotebookPanel;
  #model: MimeModel | null = null;
  #shown: '' | typeof WIDGET | typeof HTML = '';
}
