import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';
import { Panel } from '@lumino/widgets';

import { HTML, type MimeModel, SIDEBAR, sidebarOf, widgetsOf } from './sidebar_output';

const WIDGET = 'application/vnd.jupyter.widget-view+json';

/** Before ipywidgets' own renderer, which has nothing to show for a widget that is no more. */
const RANK = -20;

/** Shows the outputs of `nbguard.Sidebar()` live while their kernel has the widget, and their saved picture otherwise. */
export class SavedSidebars {
  /** Have a new notebook's outputs shown so: what a document registry calls an extension of a widget. */
  createNew(notebook: NotebookPanel): { isDisposed: boolean; dispose(): void } {
    const { rendermime } = notebook.content;
    const pictures = import('./saved_pictures').then(({ SavedPictures }) => new SavedPictures(notebook));
    rendermime.addFactory(
      { safe: false, mimeTypes: [SIDEBAR], createRenderer: () => new SidebarOutput(notebook) },
      RANK
    );
    return {
      isDisposed: false,
      dispose: () => {
        void pictures.then(each => { each.dispose(); });
        rendermime.removeMimeType(SIDEBAR);
      }
    };
  }
}

class SidebarOutput extends Panel {
  constructor(notebook: NotebookPanel) {
    super();
    this.#notebook = notebook;
    notebook.sessionContext.kernelChanged.connect(this.#onKernel, this);
    notebook.sessionContext.connectionStatusChanged.connect(this.#onKernel, this);
  }

  /** Show an output, or note what is another picture of the one that is live. */
  async renderModel(model: MimeModel): Promise<void> {
    const former = this.#model;
    this.#model = model;
    if (former === null || this.#shown !== WIDGET || sidebarOf(former.data) !== sidebarOf(model.data)) {
      this.#shown = '';
      await this.#choose();
    }
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

  async #isIn(kernel: Kernel.IKernelConnection): Promise<boolean> {
    const id = this.#model && sidebarOf(this.#model.data);
    return id !== null && id in (await widgetsOf(kernel));
  }

  readonly #onKernel = (): void => {
    void this.#choose();
  };

  readonly #notebook: NotebookPanel;
  #model: MimeModel | null = null;
  #shown: '' | typeof WIDGET | typeof HTML = '';
}
