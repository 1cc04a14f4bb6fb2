import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookActions, type NotebookPanel } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

/** Ids of the commands this extension adds. */
export const CommandIDs = {
  /** Show who holds the GPU memory. */
  gpumem: 'nbguard:gpumem',
  /** Show what a cleanup would free, without freeing anything. */
  resetGpuDryRun: 'nbguard:reset-gpu-dry-run'
} as const;

/** Insert a code cell with `source` below the active cell, make it the active one and run it. */
async function runInNewCell(panel: NotebookPanel, source: string, translator: ITranslator): Promise<void> {
  await panel.context.ready;
  const notebook = panel.content;
  const index = notebook.activeCellIndex + 1;
  notebook.model?.sharedModel.insertCell(index, { cell_type: 'code', source, metadata: { trusted: true } });
  notebook.activeCellIndex = index;
  notebook.deselectAll();
  await NotebookActions.run(notebook, panel.sessionContext, undefined, translator);
}

/** Adds the commands that run nbguard's magics, and lists them in the command palette. */
const plugin: JupyterFrontEndPlugin<void> = {
  id: 'nbguard:plugin',
  description: "Runs nbguard's magics from the command palette.",
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    translator: ITranslator | null
  ): void => {
    const language = translator ?? nullTranslator;
    const trans = language.load('nbguard');

    /** The notebook in front, or null when something else is. */
    const activeNotebook = (): NotebookPanel | null =>
      tracker.currentWidget === app.shell.currentWidget ? tracker.currentWidget : null;

    /** Register one command that runs `magic` in a new cell. */
    const addCommand = (id: string, label: string, caption: string, magic: string): void => {
      app.commands.addCommand(id, {
        label,
        caption,
        isEnabled: () => activeNotebook() !== null,
        execute: async () => {
          const panel = activeNotebook();
          if (panel) {
            await runInNewCell(panel, `%reload_ext nbguard\n${magic}`, language);
          }
        }
      });
      palette?.addItem({ command: id, category: trans.__('nbguard') });
    };

    addCommand(
      CommandIDs.gpumem,
      trans.__('GPU memory: who holds it (%gpumem)'),
      trans.__('Run %gpumem in a new cell below the active one'),
      '%gpumem'
    );
    addCommand(
      CommandIDs.resetGpuDryRun,
      trans.__('GPU memory: what a cleanup would free'),
      trans.__('Run %reset_gpu --dry-run in a new cell below the active one; nothing is freed'),
      '%reset_gpu --dry-run'
    );
  }
};

export default plugin;
