import { type Kernel, KernelMessage } from '@jupyterlab/services';

import type { Request } from './view/protocol';

/** The comm of every message between a kernel and its sidebars, and its target. */
export const COMM = 'nbguard';

/** `control` is handled while a cell runs, `shell` when it has ended. */
export type Channel = 'control' | 'shell';

/** What is sent to a kernel, over a connection of our own. Nothing is while that is not connected. */
export class KernelSender {
  /** `channel` says which channel to use now. */
  constructor(connection: Kernel.IKernelConnection, channel: () => Channel) {
    this.connection = connection;
    this.channel = channel;
  }

  get isConnected(): boolean {
    return !this.connection.isDisposed && this.connection.connectionStatus === 'connected';
  }

  get isIdle(): boolean {
    return this.isConnected && this.connection.status === 'idle';
  }

  /** Send a request to the hub. Its answer, if any, comes over iopub. */
  tell(request: Request): void {
    const message = KernelMessage.createMessage<KernelMessage.ICommMsgMsg<'shell'>>({
      msgType: 'comm_msg',
      channel: 'shell',
      session: this.connection.clientId,
      content: { comm_id: COMM, data: request }
    });
    this.post(message, false)?.dispose();
  }

  /**
   * Whether the kernel has a hub, by the comms it has; rejected where that stays unknown. Any kernel understands the question
   * and answers it while a cell runs, and JupyterLab does not take the kernel for idle then.
   */
  async ask(): Promise<boolean> {
    const message = KernelMessage.createMessage<KernelMessage.ICommInfoRequestMsg>({
      msgType: 'comm_info_request',
      channel: 'shell',
      session: this.connection.clientId,
      content: { target_name: COMM }
    });
    const asked = this.post(message, true);
    if (!asked) {
      throw new Error('not connected');
    }
    const { content } = (await asked.done) as KernelMessage.ICommInfoReplyMsg;
    return content.status === 'ok' && COMM in content.comms;
  }

  /** Run `%load_ext nbguard`, outside of the history. Comes back with what went wrong in words; empty: nothing. */
  async load(): Promise<string> {
    const code = '%load_ext nbguard';
    try {
      const run = this.connection.requestExecute({ code, store_history: false, stop_on_error: false, allow_stdin: false });
      const { content } = await run.done;
      return content.status === 'error' ? `${content.ename}: ${content.evalue}` : '';
    } catch {
      return 'The kernel was restarted or lost before it came to that.';
    }
  }

  private post(message: KernelMessage.IShellMessage, expectReply: boolean): Kernel.IShellFuture | Kernel.IControlFuture | null {
    if (!this.isConnected) {
      return null;
    }
    if (this.channel() === 'shell') {
      return this.connection.sendShellMessage(message, expectReply);
    }
    const onControl = { ...message, channel: 'control' } as unknown as KernelMessage.IControlMessage;
    return this.connection.sendControlMessage(onControl, expectReply);
  }

  private readonly connection: Kernel.IKernelConnection;
  private readonly channel: () => Channel;
}
