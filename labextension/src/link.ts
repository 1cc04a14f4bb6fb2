import { type Kernel, KernelMessage } from '@jupyterlab/services';
import { UUID } from '@lumino/coreutils';
import { type ISignal, Signal } from '@lumino/signaling';

import { ObservableModel } from './observable_model';
import { isObject } from './view/check';
import type { HostState, LoadProblem } from './view/host';
import type { Answer, Request } from './view/protocol';
import { type Channel, COMM, KernelSender } from './kernel_sender';

/** After this long (milliseconds) an idle kernel that has not said whether it has nbguard is taken to have none. */
const ANSWER_MS = 2500;
/** The longest restart without a word that it is over: then the kernel is asked all the same. */
const RESTART_MS = 10_000;

/** The language of kernels that can have nbguard, in small letters. */
const PYTHON = 'python';

type Hello = Extract<Request, { op: 'hello' }>;

/**
 * One kernel as a view sees it, over a connection of its own: it is there while a cell runs, and leaves comms to the notebook.
 *
 * A kernel without nbguard is asked nothing but whether it has it: when the connection opens, when the kernel has started,
 * and after each cell, which may have loaded it.
 */
export class KernelLink extends ObservableModel {
  readonly #connection: Kernel.IKernelConnection;

  /** `connection` is for this link alone; `channel` says which channel to use now, `notebook` whose kernel it is. */
  constructor(
    connection: Kernel.IKernelConnection,
    channel: () => Channel,
    notebook: string
  ) {
    super({ kind: 'ok' }, notebook);
    this.#connection = connection;
    this.#sender = new KernelSender(this.#connection, channel);
    this.#connection.anyMessage.connect(this.#onMessage);
    this.#connection.connectionStatusChanged.connect(this.#onConnection);
    this.#connection.disposed.connect(this.#onGone);
    void this.#learnLanguage();
  }

  get isDisposed(): boolean {
    return this.#isLeft;
  }

  /** The id of the kernel. */
  get kernel(): string {
    return this.#connection.id;
  }

  /** Emitted at the first tick of each run of the kernel. */
  get started(): ISignal<this, void> {
    return this.#startedSignal;
  }

  /** Whether there has been a tick of this run of the kernel. */
  get isLive(): boolean {
    return this.#hasTicked;
  }

  /** Call the kernel's notebook by another name from now on. */
  rename(notebook: string): void {
    if (notebook !== this.#notebook) {
      this.set('notebook', notebook);
      const host = this.get('host') as HostState;
      if (host.kind === 'not_loaded' || host.kind === 'loading') {
        this.set('host', { ...host, notebook });
      }
    }
  }

  /** Have a tick now and then, and no scan, for who shows a figure or two and calls itself `client`. Again within 15 s. */
  glance(client: string): void {
    this.#glancers.add(client);
    this.#tellGlance(client);
  }

  /** Have none for it any longer. */
  endGlance(client: string): void {
    if (this.#glancers.delete(client) && this.#isLoaded) {
      this.#sender.tell({ op: 'bye', client });
    }
  }

  /** Take word from the notebook's own connection that somebody has the kernel restarted: the kernel may not say so here. */
  noteRestart(): void {
    this.#isInCell = false;
    this.#forget({ kind: 'restarting' });
    this.#timer = setTimeout(() => void this.#ask(), RESTART_MS);
  }

  /** Take word from there that it is back. */
  noteStart(): void {
    if (this.#host.kind === 'restarting') {
      void this.#ask();
    }
  }

  dispose(): void {
    if (!this.#isLeft) {
      this.#isLeft = true;
      clearTimeout(this.#timer);
      this.#connection.dispose();
      Signal.clearData(this);
    }
  }

  /** Pass on what the view asks. Its hello is kept, to be said when the kernel has nbguard. */
  send(message: Request): void {
    if (message.op === 'hello') {
      if (this.#isLoaded && this.#hello.client !== message.client) {
        this.#sender.tell({ op: 'bye', client: this.#hello.client }); // who looked before does no longer
      }
      this.#hello = message;
      if (this.#hasTicked && this.#sender.isIdle && Date.now() - this.#heardAt > 2 * ANSWER_MS) {
        void this.#ask(); // it may have started anew without a word of it here
        return;
      }
    } else if (message.op === 'bye') {
      this.#hello = { ...this.#hello, visible: false, glance: true }; // its first tick is enough to open the panel
    }
    if (this.#isLoaded) {
      this.#sender.tell(message);
    }
  }

  /** Load nbguard into the kernel (and into each from now on), and say in the host's state what becomes of it. */
  async load(everywhere = false): Promise<void> {
    this.#isLoading = true;
    if (this.#host.kind === 'not_loaded') {
      this.set('host', { kind: 'loading', notebook: this.#notebook, waits: this.#isInCell || !this.#sender.isIdle });
    }
    const problem = await this.#sender.load(everywhere);
    this.#isLoading = false;
    if (this.#host.kind !== 'loading') {
      return; // restarted or lost meanwhile, which the view says
    }
    if (problem === null) {
      await this.#ask({ kind: 'not_served' });
    } else {
      this.#onAnswer(false, problem);
    }
  }

  get #host(): HostState {
    return this.get('host') as HostState;
  }

  /** Learn the language: at once by the specification of the kernel, and for certain by its own words, when it has time. */
  async #learnLanguage(): Promise<void> {
    const spec = this.#connection.spec.then(found => found?.language).catch(() => undefined);
    const own = this.#connection.info.then(info => info.language_info.name).catch(() => undefined);
    for (const name of [spec, own]) {
      this.#language = (await name) ?? this.#language;
      const { kind } = this.#host;
      if (!this.isDisposed && (kind === 'not_loaded' || kind === 'not_python') && this.#withoutHub().kind !== kind) {
        this.set('host', this.#withoutHub());
      }
    }
  }

  /** The state of a kernel that has no hub. */
  #withoutHub(problem?: LoadProblem): HostState {
    if (this.#language.toLowerCase() !== PYTHON) {
      return { kind: 'not_python', notebook: this.#notebook, language: this.#language };
    }
    return { kind: 'not_loaded', notebook: this.#notebook, ...(problem && { problem }) };
  }

  /** Ask whether nbguard is loaded. Until that is known nothing else is sent. `problem`: what it is if there is no hub. */
  async #ask(problem?: LoadProblem): Promise<void> {
    this.#isLoaded = false;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      if (!this.#isLoaded && this.#sender.isIdle) {
        this.#onAnswer(false, problem);
      } else if (!this.#isLoaded && this.#host.kind === 'restarting') {
        void this.#ask(problem);
      }
    }, ANSWER_MS);
    try {
      this.#onAnswer(await this.#sender.ask(), problem);
    } catch {
      return; // restarted or disconnected meanwhile: each asks again when it is over
    }
  }

  #onAnswer(isLoaded: boolean, problem?: LoadProblem): void {
    if (!isLoaded && this.#isLoading) {
      return; // it was asked at the end of the cell that loading waits for
    }
    if (!isLoaded) {
      this.#forget(this.#withoutHub(problem));
      return;
    }
    clearTimeout(this.#timer);
    this.set('host', { kind: 'ok' });
    this.#isLoaded = true;
    this.#sender.tell(this.#hello);
    for (const client of this.#glancers) {
      this.#tellGlance(client);
    }
  }

  #tellGlance(client: string): void {
    if (this.#isLoaded) {
      this.#sender.tell({ op: 'hello', client, visible: false, glance: true });
    }
  }

  readonly #onMessage = (_: unknown, { msg, direction }: Kernel.IAnyMessageArgs): void => {
    if (direction === 'send' || msg.channel !== 'iopub') {
      return;
    }
    if (KernelMessage.isCommMsgMsg(msg) && msg.content.comm_id === COMM) {
      this.#onData(msg.content.data);
    } else if (KernelMessage.isStatusMsg(msg)) {
      this.#onStatus(msg);
    }
  };

  /** Pass on a message of the hub. The view checks it. */
  #onData(data: unknown): void {
    if (!isObject(data) || this.#host.kind === 'restarting') {
      return; // the last words of the kernel that ends: the next one is asked before it is listened to
    }
    if (data.op === 'closed') {
      this.#onAnswer(false);
      return;
    }
    this.#isLoaded = true;
    this.#heardAt = Date.now();
    if (this.#host.kind !== 'ok') {
      this.set('host', { kind: 'ok' });
    }
    if (data.op === 'tick') {
      this.set('tick', data.tick ?? null);
      if (!this.#hasTicked) {
        this.#hasTicked = true;
        this.#startedSignal.emit();
      }
    } else if (data.op === 'heap') {
      this.set('heap', data.heap ?? null);
    } else {
      this.emit('msg:custom', data as unknown as Answer);
    }
  }

  /** A clone is not told of a restart: only the kernel's own words say it. */
  #onStatus({ content, parent_header: parent }: KernelMessage.IStatusMsg): void {
    const state = content.execution_state;
    if (state === 'restarting' || state === 'starting') {
      this.noteRestart();
    }
    const isOwn = parent.session === this.#connection.clientId; // what loads nbguard, answered already
    const isOfCell = 'msg_type' in parent && parent.msg_type === 'execute_request' && !isOwn;
    const cellEnded = state === 'idle' && isOfCell;
    if (isOfCell) {
      this.#isInCell = state === 'busy';
    }
    if (state === 'busy' && isOfCell && this.#host.kind === 'loading') {
      this.set('host', { ...this.#host, waits: true }); // the cell was sent before the click, and is heard of after it
    }
    if (state === 'starting' || (cellEnded && !this.#isLoaded)) {
      void this.#ask();
    }
  }

  readonly #onConnection = (_: unknown, status: Kernel.ConnectionStatus): void => {
    const { kind } = this.#host;
    if (this.isDisposed) {
      return;
    }
    if (status === 'connected') {
      void this.#ask();
      if (kind === 'disconnected') {
        this.set('host', { kind: 'ok' });
      }
    } else if (kind === 'ok' || kind === 'not_loaded' || kind === 'not_python' || kind === 'loading') {
      this.set('host', { kind: 'disconnected' });
    }
  };

  readonly #onGone = (): void => {
    if (!this.isDisposed) {
      this.#isInCell = false;
      this.#forget({ kind: 'dead' });
    }
  };

  /** Nothing that was known holds any longer. */
  #forget(host: HostState): void {
    clearTimeout(this.#timer);
    this.#isLoaded = false;
    this.#hasTicked = false;
    this.set('tick', {});
    this.set('heap', {});
    this.set('host', host);
  }

  get #notebook(): string {
    return this.get('notebook') as string;
  }

  readonly #sender: KernelSender;
  #language = PYTHON;
  readonly #startedSignal = new Signal<this, void>(this);
  #hello: Hello = { op: 'hello', client: UUID.uuid4(), visible: false, glance: true };
  readonly #glancers = new Set<string>();
  #isLoaded = false;
  #isLoading = false;
  /** A cell runs: the kernel calls itself idle beside it, after a message on another channel. */
  #isInCell = false;
  #hasTicked = false;
  #heardAt = 0;
  #isLeft = false;
  #timer: ReturnType<typeof setTimeout> | undefined;
}
