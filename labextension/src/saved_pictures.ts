import type { NotebookPanel } from '@jupyterlab/notebook';
import { UUID } from '@lumino/coreutils';

import { afterCells } from './after_cells';
import { KernelSender } from './kernel_sender';
import { hasOwnPicture, HTML, type MimeModel, sidebarOf, widgetsOf } from './sidebar_output';
import { isObject } from './view/check';
import { isAnswer } from './view/protocol';

/** The outputs of a code cell. */
interface Outputs {
  length: number;
  get(index: number): MimeModel;
}

/**
 * Keeps the pictures in the live outputs of `nbguard.Sidebar()` those of the end of the last cell, as the notebook may be
 * saved at any time. A picture that comes while it is saved is in the next saving.
 */
export class SavedPictures {
  constructor(notebook: NotebookPanel) {
    this.#notebook = notebook;
    this.dispose = afterCells(notebook, { saving: 'started', ask: this.#ask, take: this.#take });
  }

  readonly dispose: () => void;

  readonly #ask = (): void => {
    void this.#askFor(this.#outputs());
  };

  async #askFor(outputs: readonly MimeModel[]): Promise<void> {
    const kernel = this.#notebook.sessionContext.session?.kernel;
    if (kernel?.status !== 'idle' || outputs.length === 0) {
      return;
    }
    const widgets = await widgetsOf(kernel); // what another run of the kernel has shown keeps its picture
    this.#live = new Set(outputs.map(({ data }) => sidebarOf(data)).filter(id => id !== null && id in widgets));
    if (this.#live.size > 0 && !kernel.isDisposed) {
      this.#rid = UUID.uuid4();
      new KernelSender(kernel, () => 'control').tell({ op: 'picture', rid: this.#rid });
    }
  }

  readonly #take = (answer: unknown): void => {
    if (isObject(answer) && answer.rid === this.#rid && isAnswer(answer) && answer.op === 'picture') {
      for (const output of this.#outputs()) {
        if (this.#live.has(sidebarOf(output.data)) && output.data[HTML] !== answer.html) {
          output.setData({ data: { ...output.data, [HTML]: answer.html } });
        }
      }
    }
  };

  /** The outputs of `nbguard.Sidebar()` in the notebook, also of cells that are not drawn. */
  #outputs(): MimeModel[] {
    const areas = [...(this.#notebook.content.model?.cells ?? [])].flatMap(cell => ('outputs' in cell ? [cell.outputs as Outputs] : []));
    const outputs = areas.flatMap(area => Array.from({ length: area.length }, (_, i) => area.get(i)));
    return outputs.filter(({ data }) => sidebarOf(data) !== null && !hasOwnPicture(data));
  }

  readonly #notebook: NotebookPanel;
  #live: ReadonlySet<string | null> = new Set();
  #rid = '';
}
