import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ICommandPalette } from '@jupyterlab/apputils';
import { type INotebookTracker, NotebookActions, type NotebookPanel } from '@jupyterlab/notebook';
import type { ITranslator } from '@jupyterlab/translation';

import type { MemoryPanel } from './panel';

/** Ids of the commands this extension adds. */
export const CommandIDs = {
  /** Show the panel, or hide it. */
  togglePanel: 'nbguard:toggle-panel',
  /** Show in the panel what cleaning would free, and ask whether to. */
  cleanStale: 'nbguard:clean-stale',
  /** Show who holds the GPU memory. */
  gpumem: 'nbguard:gpumem',
  /** Show what a cleanup would free, without freeing anything. */
  resetGpuDryRun: 'nbguard:reset-gpu-dry-run'
} as const;

/** Add the commands of the panel. */
export function addPanelCommands(app: JupyterFrontEnd, panel: MemoryPanel, translator: ITranslator): void {
  const trans = translator.load('nbguard');

  app.commands.addCommand(CommandIDs.togglePanel, {
    label: trans.__('GPU memory: show the panel'),
    caption: trans.__('Show or hide the panel with the GPU memory of the notebook in front'),
    isToggleable: true,
    isToggled: () => panel.isVisible,
    execute: () => {
      if (panel.isVisible) {
        collapse(app.shell, panel);
        app.shell.currentWidget?.activate();
      } else {
        app.shell.activateById(panel.id);
        void panel.focus();
      }
      app.commands.notifyCommandChanged(CommandIDs.togglePanel);
    }
  });

  app.commands.addCommand(CommandIDs.cleanStale, {
    label: trans.__('GPU memory: clean stale…'),
    caption: trans.__('Show in the panel what cleaning would free, and ask before it is done'),
    execute: () => {
      app.shell.activateById(panel.id);
      void panel.focus().then(() => panel.planCleaning()); // the plan takes the focus from the panel, not the panel from the plan
    }
  });
}

/** Add the commands that run a magic in a new cell. */
export function addMagicCommands(app: JupyterFrontEnd, tracker: INotebookTracker, translator: ITranslator): void {
  const trans = translator.load('nbguard');

  /** The notebook in front, or null when something else is. */
  const activeNotebook = (): NotebookPanel | null =>
    tracker.currentWidget === app.shell.currentWidget ? tracker.currentWidget : null;

  const add = (id: string, label: string, magic: string): void => {
    app.commands.addCommand(id, {
      label,
      caption: trans.__('Run %1 in a new cell below the active one', magic),
      isEnabled: () => activeNotebook() !== null,
      execute: async () => {
        const notebook = activeNotebook();
        if (notebook) {
          await runInNewCell(notebook, `%reload_ext nbguard\n${magic}`, translator);
        }
      }
    });
  };

  add(CommandIDs.gpumem, trans.__('GPU memory: who holds it (%gpumem)'), '%gpumem');
  add(CommandIDs.resetGpuDryRun, trans.__('GPU memory: what a cleanup would free'), '%reset_gpu --dry-run');
}

/** List every command in the command palette. */
export function addToPalette(palette: ICommandPalette, category: string): void {
  for (const command of Object.values(CommandIDs)) {
    palette.addItem({ command, category });
  }
}

/** Collapse the side where `panel` is now: JupyterLab lets users move it. */
function collapse(shell: JupyterFrontEnd.IShell, panel: MemoryPanel): void {
  const sides = shell as unknown as { collapseLeft(): void; collapseRight(): void };
  if (Array.from(shell.widgets('left')).includes(panel)) {
    sides.collapseLeft();
  } else {
    sides.collapseRight();
  }
}

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
