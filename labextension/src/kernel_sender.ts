import { type Kernel, KernelMessage } from '@jupyterlab/services';

import { isObject } from './view/check';
import type { LoadProblem } from './view/host';
import type { Request } from './view/protocol';

/** The comm of every message between a kernel and its sidebars, and its target. */
export const COMM = 'nbguard';

/** `control` is handled while a cell runs, `shell` when it has ended. */
export type Channel = 'control' | 'shell';

/**
 * Loads nbguard, and serves the panel where it is loaded and does not (`%nbguard off`). `answer` is a LoadProblem or None,
 * in characters that no `repr` escapes. Nothing is raised: it would be the last error of the user.
 */
const LOAD = `
import importlib.util, json, sys, urllib.parse
from IPython import get_ipython
problem = None
try:
    importlib.invalidate_caches()
    if importlib.util.find_spec("nbguard") is None:
        problem = {"kind": "no_package", "python": sys.executable or "Python"}
    else:
        from nbguard.frontend.notebook.startup import load
        load(get_ipython(), everywhere)
except Exception as error:
    problem = {"kind": "failed", "error": f"{type(error).__name__}: {error}"[:500]}
answer = urllib.parse.quote(json.dumps(problem))
`;

/** LOAD as an expression: no cell, so that it leaves no name behind and is in no history. `everywhere`: as `nbguard enable`, too. */
const expression = (everywhere: boolean): string =>
  `(lambda names: (exec(${JSON.stringify(LOAD)}, names), names["answer"])[1])({"everywhere": ${everywhere ? 'True' : 'False'}})`;

/** What is sent to a kernel, over a connection of our own. Nothing is while that is not connected. */
export class KernelSender {
  /** `channel` says which channel to use now. */
  constructor(connection: Kernel.IKernelConnection, channel: () => Channel) {
    this.#connection = connection;
    this.#channel = channel;
  }

  get isConnected(): boolean {
    return !this.#connection.isDisposed && this.#connection.connectionStatus === 'connected';
  }

  get isIdle(): boolean {
    return this.isConnected && this.#connection.status === 'idle';
  }

  /** Send a request to the hub. Its answer, if any, comes over iopub. */
  tell(request: Request): void {
    const message = KernelMessage.createMessage<KernelMessage.ICommMsgMsg<'shell'>>({
      msgType: 'comm_msg',
      channel: 'shell',
      session: this.#connection.clientId,
      content: { comm_id: COMM, data: request }
    });
    this.#post(message, false)?.dispose();
  }

  /**
   * Whether the kernel has a hub, by the comms it has; rejected where that stays unknown. Any kernel understands the question
   * and answers it while a cell runs, and JupyterLab does not take the kernel for idle then.
   */
  async ask(): Promise<boolean> {
    return COMM in (await this.comms(COMM));
  }

  /** The comms of a target that the kernel has, by id; rejected where that stays unknown. */
  async comms(target: string): Promise<object> {
    const message = KernelMessage.createMessage<KernelMessage.ICommInfoRequestMsg>({
      msgType: 'comm_info_request',
      channel: 'shell',
      session: this.#connection.clientId,
      content: { target_name: target }
    });
    const asked = this.#post(message, true);
    if (!asked) {
      throw new Error('not connected');
    }
    const { content } = (await asked.done) as KernelMessage.ICommInfoReplyMsg;
    return content.status === 'ok' ? content.comms : {};
  }

  /**
   * Load nbguard, outside of the history; with `everywhere`, also in each notebook of the kernel's IPython profile from now on.
   * Comes back with the problem; null: there was none.
   */
  async load(everywhere = false): Promise<LoadProblem | null> {
    try {
      const { content } = await this.#connection.requestExecute({
        code: '',
        store_history: false,
        stop_on_error: false,
        allow_stdin: false,
        user_expressions: { load: expression(everywhere) }
      }).done;
      return content.status === 'ok' ? problemOf(content.user_expressions) : { kind: 'not_run' };
    } catch {
      return { kind: 'not_run' };
    }
  }

  #post(message: KernelMessage.IShellMessage, expectReply: boolean): Kernel.IShellFuture | Kernel.IControlFuture | null {
    if (!this.isConnected) {
      return null;
    }
    if (this.#channel() === 'shell') {
      return this.#connection.sendShellMessage(message, expectReply);
    }
    const onControl = { ...message, channel: 'control' } as unknown as KernelMessage.IControlMessage;
    return this.#connection.sendControlMessage(onControl, expectReply);
  }

  readonly #connection: Kernel.IKernelConnection;
  readonly #channel: () => Channel;
}

/** The problem that a kernel tells of in the value of that expression; null: none. */
function problemOf(values: unknown): LoadProblem | null {
  const load = isObject(values) ? values.load : null;
  const text = isObject(load) && isObject(load.data) ? load.data['text/plain'] : null;
  if (typeof text !== 'string') {
    return { kind: 'not_served' }; // it evaluates no expressions of Python
  }
  return JSON.parse(decodeURIComponent(text.replaceAll("'", ''))) as LoadProblem | null;
}
