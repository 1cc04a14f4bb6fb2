import { type Kernel, KernelMessage } from '@jupyterlab/services';
import { type JSONObject, UUID } from '@lumino/coreutils';
import { type ISignal, Signal } from '@lumino/signaling';

import { Facts } from './model';
import type { Answer, HostState, Request } from './view/protocol';
import { type Channel, COMM, Wire } from './wire';

/** After this long (milliseconds) an idle kernel that has not said whether it has nbguard is taken to have none. */
const ANSWER_MS = 2500;

type Hello = Extract<Request, { op: 'hello' }>;
type FromHub = { op: 'tick'; tick: JSONObject } | { op: 'heap'; heap: JSONObject } | { op: 'closed' } | Answer;

/**
 * One kernel as a view sees it, over a connection of its own: it is there while a cell runs, and leaves comms to the notebook.
 *
 * A kernel without nbguard is asked nothing but whether it has it: when the connection opens, when the kernel has started,
 * and after each cell, which may have loaded it.
 */
export class KernelLink extends Facts {
  /** `channel` says which channel to use now, `notebook` is what to call whom the kernel belongs to. */
  constructor(kernel: Kernel.IKernelConnection, channel: () => Channel, notebook: string) {
    super({ kind: 'ok' });
    this._notebook = notebook;
    this._connection = kernel.clone({ handleComms: false });
    this._wire = new Wire(this._connection, channel);
    this._connection.anyMessage.connect(this._onMessage);
    this._connection.connectionStatusChanged.connect(this._onConnection);
    this._connection.disposed.connect(this._onGone);
  }

  /** Emitted at the first tick of each run of the kernel. */
  get started(): ISignal<this, void> {
    return this._started;
  }

  /** Whether there has been a tick of this run of the kernel. */
  get isLive(): boolean {
    return this._isLive;
  }

  dispose(): void {
    if (!this._isDisposed) {
      this._isDisposed = true;
      clearTimeout(this._timer);
      this._connection.dispose();
      Signal.clearData(this);
    }
  }

  /** Pass on what the view asks. Its hello is kept, to be said when the kernel has nbguard. */
  send(message: Request): void {
    if (message.op === 'hello') {
      if (this._isLoaded && this._hello.client !== message.client) {
        this._wire.tell({ op: 'bye', client: this._hello.client }); // who looked before does no longer
      }
      this._hello = message;
      if (this._isLive && this._wire.isIdle && Date.now() - this._heardAt > 2 * ANSWER_MS) {
        void this._ask(); // it may have started anew without a word of it here
        return;
      }
    } else if (message.op === 'bye') {
      this._hello = { ...this._hello, visible: false };
    }
    if (this._isLoaded) {
      this._wire.tell(message);
    }
  }

  /** Load nbguard into the kernel. Comes back with what went wrong in words; empty: nothing. */
  async load(): Promise<string> {
    this._isLoading = true;
    if ((this.get('host') as HostState).kind === 'not_loaded') {
      this.set('host', { kind: 'loading', notebook: this._notebook, waits: !this._wire.isIdle });
    }
    const problem = await this._wire.load();
    this._isLoading = false;
    if ((this.get('host') as HostState).kind === 'loading') {
      void this._ask();
    }
    return problem;
  }

  /** Ask whether nbguard is loaded. Until that is known nothing else is sent. */
  private async _ask(): Promise<void> {
    this._isLoaded = false;
    clearTimeout(this._timer);
    this._timer = setTimeout(() => {
      if (!this._isLoaded && this._wire.isIdle) {
        this._onAnswer(false);
      }
    }, ANSWER_MS);
    try {
      this._onAnswer(await this._wire.ask());
    } catch {
      return; // restarted or disconnected meanwhile: each asks again when it is over
    }
  }

  private _onAnswer(isLoaded: boolean): void {
    if (!isLoaded && this._isLoading) {
      return; // it was asked at the end of the cell that loading waits for
    }
    if (!isLoaded) {
      this._forget({ kind: 'not_loaded', notebook: this._notebook });
      return;
    }
    clearTimeout(this._timer);
    this.set('host', { kind: 'ok' });
    this._isLoaded = true;
    this._wire.tell(this._hello);
  }

  private readonly _onMessage = (_: unknown, { msg, direction }: Kernel.IAnyMessageArgs): void => {
    if (direction === 'send' || msg.channel !== 'iopub') {
      return;
    }
    if (KernelMessage.isCommMsgMsg(msg) && msg.content.comm_id === COMM) {
      this._onData(msg.content.data as FromHub);
    } else if (KernelMessage.isStatusMsg(msg)) {
      this._onStatus(msg);
    }
  };

  private _onData(data: FromHub): void {
    if (data.op === 'closed') {
      this._onAnswer(false);
      return;
    }
    this._isLoaded = true;
    this._heardAt = Date.now();
    if ((this.get('host') as HostState).kind !== 'ok') {
      this.set('host', { kind: 'ok' });
    }
    if (data.op === 'tick') {
      this.set('tick', data.tick);
      if (!this._isLive) {
        this._isLive = true;
        this._started.emit();
      }
    } else if (data.op === 'heap') {
      this.set('heap', data.heap);
    } else {
      this.emit('msg:custom', data);
    }
  }

  /** A clone is not told of a restart: only the kernel's own words say it. */
  private _onStatus({ content, parent_header: parent }: KernelMessage.IStatusMsg): void {
    const state = content.execution_state;
    if (state === 'restarting' || state === 'starting') {
      this._forget({ kind: 'restarting' });
    }
    const cellEnded = state === 'idle' && 'msg_type' in parent && parent.msg_type === 'execute_request';
    if (state === 'starting' || (cellEnded && !this._isLoaded)) {
      void this._ask();
    }
  }

  private readonly _onConnection = (_: unknown, status: Kernel.ConnectionStatus): void => {
    const { kind } = this.get('host') as HostState;
    if (this._isDisposed) {
      return;
    }
    if (status === 'connected') {
      void this._ask();
      if (kind === 'disconnected') {
        this.set('host', { kind: 'ok' });
      }
    } else if (kind === 'ok' || kind === 'not_loaded' || kind === 'loading') {
      this.set('host', { kind: 'disconnected' });
    }
  };

  private readonly _onGone = (): void => {
    if (!this._isDisposed) {
      this._forget({ kind: 'dead' });
    }
  };

  /** Nothing that was known holds any longer. */
  private _forget(host: HostState): void {
    clearTimeout(this._timer);
    this._isLoaded = false;
    this._isLive = false;
    this.set('tick', {});
    this.set('heap', {});
    this.set('host', host);
  }

  private readonly _connection: Kernel.IKernelConnection;
  private readonly _wire: Wire;
  private readonly _notebook: string;
  private readonly _started = new Signal<this, void>(this);
  private _hello: Hello = { op: 'hello', client: UUID.uuid4(), visible: false };
  private _isLoaded = false;
  private _isLoading = false;
  private _isLive = false;
  private _heardAt = 0;
  private _isDisposed = false;
  private _timer: ReturnType<typeof setTimeout> | undefined;
}
