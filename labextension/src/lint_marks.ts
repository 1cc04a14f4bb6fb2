import type { Cell } from '@jupyterlab/cells';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { UUID } from '@lumino/coreutils';

import lintStyle from '../style/lint.css';
import { afterCells } from './after_cells';
import { KernelSender } from './kernel_sender';
import { addStyle } from './style';
import { isObject } from './view/check';
import { element } from './view/dom';
import { type CellFinding, isAnswer } from './view/protocol';

/** Milliseconds after a notebook was opened until its cells are checked: its kernel may be there by then. */
const OPENED = 1000;

/** Lines that are told of at a cell. */
const MOST = 3;

addStyle(lintStyle);

/**
 * Marks below the cells of a notebook whose code keeps memory or wastes time, as `nbguard lint` finds them: after a cell has ended,
 * and when the notebook is saved. A cell that is edited loses its mark, as its lines may be others then. Where the kernel has no
 * nbguard nothing is asked.
 */
export class LintMarks {
  /** `wanted` says whether the user wants marks now. */
  constructor(notebook: NotebookPanel, wanted: () => boolean) {
    this.#notebook = notebook;
    this.#wanted = wanted;
    const end = afterCells(notebook, { saving: 'completed', ask: this.#ask, take: this.#take });
    notebook.disposed.connect(end);
    setTimeout(this.#ask, OPENED);
  }

  readonly #ask = (): void => {
    if (!this.#notebook.isDisposed) {
      void this.#askFor(this.#cells());
    }
  };

  async #askFor(cells: readonly Cell[]): Promise<void> {
    const kernel = this.#notebook.sessionContext.session?.kernel;
    if (!this.#wanted()) {
      this.#clear();
      this.#asked = '';
    } else if (kernel?.status === 'idle') {
      const sender = new KernelSender(kernel, () => 'control');
      const sent = cells.map(cell => [cell, sourceOf(cell)] as const);
      const sources = sent.map(([, source]) => source);
      const code = JSON.stringify([kernel.id, sources]);
      if (code !== this.#asked && (await sender.ask().catch(() => false))) {
        this.#asked = code;
        this.#sent = sent;
        this.#rid = UUID.uuid4();
        sender.tell({ op: 'lint', rid: this.#rid, cells: sources });
      }
    }
  }

  readonly #take = (answer: unknown): void => {
    if (isObject(answer) && answer.rid === this.#rid && isAnswer(answer) && answer.op === 'lint') {
      this.#clear();
      for (const [place, [cell, source]] of this.#sent.entries()) {
        const found = answer.findings.filter(each => each.cell === place);
        if (found.length > 0 && !cell.isDisposed && sourceOf(cell) === source) {
          this.#mark(cell, found);
        }
      }
    }
  };

  #mark(cell: Cell, found: readonly CellFinding[]): void {
    const lines = found.slice(0, MOST).map(each => {
      const line = element('div', '', `line ${String(each.line)}: `, ...inline(each.message), ` ${each.code}`);
      line.title = `# noqa: ${each.code} at the end of the line says that it is meant so`;
      return line;
    });
    const mark = element('div', 'lint', ...lines, found.length > MOST ? `and ${String(found.length - MOST)} more` : '');
    mark.setAttribute('role', 'note');
    mark.setAttribute('aria-label', 'nbguard lint');
    this.#marks.add(mark);
    const onEdit = (): void => {
      cell.model.contentChanged.disconnect(onEdit);
      this.#asked = ''; // it may be edited back
      this.#marks.delete(mark);
      mark.remove();
    };
    cell.model.contentChanged.connect(onEdit);
    void cell.ready.then(() => { // a cell that has not been in view yet is empty
      if (this.#marks.has(mark)) {
        const input = cell.node.querySelector(':scope > .jp-Cell-inputWrapper');
        cell.node.insertBefore(mark, input?.nextSibling ?? null);
      }
    });
  }

  #clear(): void {
    for (const mark of this.#marks) {
      mark.remove();
    }
    this.#marks.clear();
  }

  #cells(): readonly Cell[] {
    return this.#notebook.content.widgets.filter(cell => cell.model.type === 'code');
  }

  readonly #notebook: NotebookPanel;
  readonly #wanted: () => boolean;
  readonly #marks = new Set<HTMLElement>();
  #sent: readonly (readonly [Cell, string])[] = [];
  #asked = '';
  #rid = '';
}

function sourceOf(cell: Cell): string {
  return cell.model.sharedModel.getSource();
}

/** A message, whose code stands between backticks. */
function inline(message: string): (Node | string)[] {
  return message.split('`').map((piece, place) => (place % 2 === 1 ? element('code', '', piece) : piece));
}
