/** What the view says where there is nothing to show, and why. */

import type { Connection } from './connection';
import { button, element, setEnabled, setSentence, setText, show } from './dom';
import type { Host, LoadProblem } from './host';
import type { Trans } from './words';

interface Words {
  sentence: string;
  note: string;
  isLoadable: boolean;
}

export class Notice {
  readonly node = element('section', 'section notice');
  readonly #sentence = element('p');
  readonly #load: HTMLButtonElement;
  readonly #everywhere: HTMLButtonElement;
  readonly #note = element('p', 'dim');

  readonly #trans: Trans;
  readonly #host: Host;

  constructor(
    trans: Trans,
    host: Host
  ) {
    this.#trans = trans;
    this.#host = host;
    this.#load = button('primary', trans.__('Load nbguard'), () => host.load?.(false));
    this.#everywhere = button('', trans.__('Load in every notebook'), () => host.load?.(true));
    this.#everywhere.title = trans.__('Writes a file into the startup folder of IPython; `nbguard disable` in a terminal removes it.');
    this.#sentence.dir = 'auto';
    this.node.append(this.#sentence, this.#load, this.#everywhere, this.#note);
  }

  /** Show why there is nothing else to show. Returns whether that is so. */
  update(connection: Connection): boolean {
    const words = this.#words(connection);
    show(this.node, words !== null);
    if (words !== null) {
      setText(this.#sentence, words.sentence);
      setSentence(this.#note, words.note);
      show(this.#note, words.note !== '');
      for (const load of [this.#load, this.#everywhere]) {
        show(load, words.isLoadable && this.#host.load !== undefined);
        setEnabled(load, connection.host.kind === 'not_loaded');
      }
    }
    return words !== null;
  }

  #words({ host, foreign, tick }: Connection): Words | null {
    const trans = this.#trans;
    const say = (sentence: string, note = '', isLoadable = false): Words => ({ sentence, note, isLoadable });
    switch (host.kind) {
      case 'no_kernel':
        return say(
          trans.__('No kernel to look at.'),
          trans.__('Open a notebook with a Python kernel: its memory is shown here.')
        );
      case 'not_python':
        return say(
          trans.__('The kernel of %1 runs %2.', host.notebook, host.language),
          trans.__('nbguard looks into Python kernels only.')
        );
      case 'not_loaded':
        return host.problem ? this.#notLoadable(host.notebook, host.problem) : say(
          trans.__('nbguard is not loaded in %1.', host.notebook),
          this.#host.load ? trans.__('Runs `%load_ext nbguard` in its kernel.') : trans.__('Run `%load_ext nbguard` in a cell.'),
          true
        );
      case 'loading':
        return say(
          trans.__('nbguard is not loaded in %1.', host.notebook),
          host.waits ? trans.__('It loads when the cell ends.') : trans.__('Loading…'),
          true
        );
      case 'disconnected':
        return say(
          trans.__('The connection to the kernel is lost.'),
          trans.__('Figures come back with it; nothing in the kernel has changed.')
        );
      case 'restarting':
        return say(trans.__('The kernel restarts.'), trans.__('All memory of its devices is free again then.'));
      case 'gone':
        return say(trans.__('The kernel was restarted.'), trans.__('What it held is free. Run this cell again to see its memory.'));
      case 'dead':
        return say(trans.__('The kernel has died.'), trans.__('Its memory is free again. Restart the kernel to go on.'));
      case 'ok':
        return foreign ? this.#otherVersion() : tick === null ? this.#waiting() : null;
    }
  }

  #notLoadable(notebook: string, problem: LoadProblem): Words {
    const trans = this.#trans;
    const failed = (note: string): Words => ({
      sentence: trans.__('nbguard could not be loaded in %1.', notebook),
      note,
      isLoadable: true
    });
    switch (problem.kind) {
      case 'no_package':
        return {
          sentence: trans.__('nbguard is not installed for the kernel of %1.', notebook),
          note: trans.__('Run `%pip install nbguard` in a cell of it: that installs into the environment of the kernel, `%1`.', problem.python),
          isLoadable: true
        };
      case 'failed':
        return failed(problem.error);
      case 'not_run':
        return failed(trans.__('The kernel was restarted, lost, or had an error before it got to that. Try again.'));
      case 'not_served':
        return failed(trans.__('The magics work: run `%gpumem` in a cell. This kind of kernel cannot answer the panel.'));
    }
  }

  #otherVersion(): Words {
    const trans = this.#trans;
    return {
      sentence: trans.__('The kernel has another version of nbguard than this page.'),
      note: trans.__('Reload the page; if that does not help, upgrade nbguard where JupyterLab runs and in the kernel.'),
      isLoadable: false
    };
  }

  #waiting(): Words {
    const trans = this.#trans;
    return {
      sentence: trans.__('Waiting for the first data…'),
      note: trans.__('If this takes longer, the kernel is busy or has been restarted.'),
      isLoadable: false
    };
  }
}
