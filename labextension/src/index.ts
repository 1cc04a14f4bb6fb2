import { ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import panelStyle from '../style/panel.css';
import { CommandIDs, addMagicCommands, addPanelCommands, addToPalette } from './commands';
import { FrontKernel } from './follow';
import { KernelLink } from './link';
import { type Head, IHead, noteOpen, openingOf, wasOpen } from './opening';
import { loadView, MemoryPanel } from './panel';
import { SavedSidebars } from './saved_sidebar';
import { read } from './settings';
import { StatusItem } from './status';
import { addStyle } from './style';

const PLUGIN = 'nbguard:plugin';

/** Behind the debugger and the table of contents, which JupyterLab itself puts at the side. */
const RANK = 1000;

/** Milliseconds after the layout is back until the notebook that the page's address names has its kernel, at the latest. */
const OPENED = 10_000;

/** Begins what need not wait for the notebooks' plugin: settings, and the kernel of the notebook that the page is opening. */
const head: JupyterFrontEndPlugin<Head> = {
  id: 'nbguard:head',
  description: 'Looks at the kernel of the notebook that a page is opening before the notebook is there.',
  autoStart: true,
  optional: [ISettingRegistry],
  provides: IHead,
  activate: async (app: JupyterFrontEnd, registry: ISettingRegistry | null): Promise<Head> => {
    if (wasOpen()) {
      void loadView(); // so that it is there when the panel opens
    }
    const stored = (await registry?.load(PLUGIN).catch(() => null)) ?? null;
    const opening = openingOf(app.serviceManager, location.pathname, () => read(stored).channel);
    return { stored, opening: opening.catch(() => null) }; // a page that cannot be told waits for the notebook, as ever
  }
};

/** Adds the panel that shows the GPU memory of the notebook in front, and the commands. */
const plugin: JupyterFrontEndPlugin<void> = {
  id: PLUGIN,
  description: 'Shows who holds the GPU memory of the notebook in front, and cleans it up.',
  autoStart: true,
  requires: [INotebookTracker, IHead],
  optional: [ILayoutRestorer, ICommandPalette, ITranslator, IStatusBar],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    { stored, opening }: Head,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null,
    translator: ITranslator | null,
    statusBar: IStatusBar | null
  ): void => {
    const language = translator ?? nullTranslator;
    const trans = language.load('nbguard');
    let settings = read(stored);

    const front = new FrontKernel(tracker, () => settings.channel, app.serviceManager.sessions);
    const open = (path: string): void => void app.commands.execute('docmanager:open', { path });
    const panel = new MemoryPanel(front, trans, Others => new Others(front, app.serviceManager, () => settings.channel, open));
    restorer?.add(panel, panel.id);
    app.shell.add(panel, settings.side, { rank: RANK });

    void opening.then(async notebook => {
      if (notebook !== null) {
        front.expect(notebook);
        await app.restored;
        setTimeout(() => { front.stopExpecting(); }, OPENED);
      }
    });
    if (wasOpen()) {
      const openPanel = (): void => { app.shell.activateById(panel.id); };
      void app.started.then(openPanel); // JupyterLab itself opens it last of all, with the layout
      if (restorer === null) { // Notebook 7 restores no layout, and has nothing at its sides before there is a notebook
        const openBeside = (): void => {
          if (tracker.currentWidget !== null) {
            tracker.currentChanged.disconnect(openBeside);
            void Promise.all([app.started, tracker.currentWidget.revealed]).then(openPanel);
          }
        };
        tracker.currentChanged.connect(openBeside);
      }
    }
    noteOpen(() => panel.isVisible);

    stored?.changed.connect(() => {
      const before = settings;
      settings = read(stored);
      if (settings.side !== before.side) {
        app.shell.add(panel, settings.side, { rank: RANK });
        app.shell.activateById(panel.id);
      }
    });

    const openOnData = async (): Promise<void> => {
      await app.restored; // what is opened before is closed again by the layout
      if (settings.openOnData && !panel.wasSeen && front.current instanceof KernelLink && front.current.isLive) {
        app.shell.activateById(panel.id);
      }
    };
    front.started.connect(() => void openOnData());
    front.changed.connect(() => void openOnData());

    tracker.widgetAdded.connect((_, notebook) => { // a page does not wait for the marks
      void import('./lint_marks').then(({ LintMarks }) => new LintMarks(notebook, () => settings.lintMarks));
    });

    addPanelCommands(app, panel, language);
    addMagicCommands(app, tracker, language);
    if (statusBar && settings.statusBar) {
      const item = new StatusItem(front, trans, () => void app.commands.execute(CommandIDs.togglePanel));
      statusBar.registerStatusItem('nbguard:status', { item, align: 'right', rank: 200 });
    }
    if (palette) {
      addToPalette(palette, trans.__('nbguard'));
    }
  }
};

/** Shows the outputs of `nbguard.Sidebar()` also where their kernel is gone. It is there before the first notebook is. */
const savedSidebars: JupyterFrontEndPlugin<void> = {
  id: 'nbguard:saved-sidebars',
  description: 'Shows the saved picture of a sidebar in a notebook whose kernel is gone.',
  autoStart: true,
  activate: (app: JupyterFrontEnd): void => {
    app.docRegistry.addWidgetExtension('Notebook', new SavedSidebars());
  }
};

addStyle(panelStyle);

export default [head, plugin, savedSidebars];
