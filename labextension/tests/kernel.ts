/** A kernel at the other end of JupyterLab's own connection: what it is told, and what it says. */

import { Kernel, KernelConnection, KernelMessage, ServerConnection } from '@jupyterlab/services';

import type { LoadProblem } from '../src/view/host';

type Message = KernelMessage.IMessage;

/** The reply of a kernel that has evaluated the expression that loads nbguard. */
export function evaluated(problem: LoadProblem | null): object {
  const text = `'${encodeURIComponent(JSON.stringify(problem)).replaceAll("'", "%27")}'`;
  return { status: 'ok', user_expressions: { load: { status: 'ok', data: { 'text/plain': text } } } };
}

function ofCell(): Message {
  return KernelMessage.createMessage<KernelMessage.IExecuteRequestMsg>({
    msgType: 'execute_request', channel: 'shell', session: 'notebook', content: { code: '' }
  });
}

/** Answers what every kernel answers; `hasHub`: that it has the comm of nbguard, too. */
export class FakeKernel {
  hasHub = false;
  answers = true;
  /** What waits on the shell channel for the end of the cell that runs; null: none does. */
  private waiting: (() => void)[] | null = null;
  isReachable = true;
  readonly told: { channel: string; data: { op: string; visible?: boolean } }[] = [];
  readonly asked: string[] = [];
  readonly ran: Message[] = [];
  readonly sockets = new Set<FakeSocket>();
  language = 'python';
  specification = 'python';
  /** The reply to what loads nbguard. */
  loading: () => object = () => evaluated(null);

  /** A notebook's connection to it. */
  connect(id = 'kernel-1'): Kernel.IKernelConnection {
    // eslint-disable-next-line @typescript-eslint/no-this-alias
    const kernel = this;
    class Socket extends FakeSocket {
      constructor() {
        super(kernel);
      }
    }
    const model: Kernel.IModel = { id, name: 'python3' };
    const fetch = (request: Request): Promise<Response> => {
      const answer = request.url.includes('kernelspecs') ? this.specifications() : model;
      return this.isReachable ? Promise.resolve(new Response(JSON.stringify(answer))) : Promise.reject(new TypeError('no network'));
    };
    const serverSettings = ServerConnection.makeSettings({
      baseUrl: 'http://localhost/',
      WebSocket: Socket as unknown as typeof WebSocket,
      fetch: fetch as unknown as typeof window.fetch
    });
    return new KernelConnection({ model, serverSettings, handleComms: true });
  }

  private specifications(): object {
    const spec = { language: this.specification, display_name: 'a kernel', argv: [], env: {} };
    return { default: 'python3', kernelspecs: { python3: { name: 'python3', spec, resources: {} } } };
  }

  /** Publish on iopub. */
  publish(msgType: string, content: object, parent?: Message): void {
    this.sockets.forEach(socket => {
      socket.say('iopub', msgType, content, parent);
    });
  }

  tick(n: number): void {
    this.publish('comm_msg', { comm_id: 'nbguard', data: { op: 'tick', tick: { v: 2, n } } });
  }

  /** Begin a cell, which keeps the shell channel busy until it ends. */
  beginCell(): void {
    this.takeCell();
    this.announceCell();
  }

  /** Take a cell, and say nothing of it yet. */
  takeCell(): void {
    this.waiting = [];
  }

  /** Say that the cell runs. */
  announceCell(): void {
    this.publish('status', { execution_state: 'busy' }, ofCell());
  }

  /** Say that a cell has ended. */
  endCell(): void {
    const waiting = this.waiting ?? [];
    this.waiting = null;
    this.publish('status', { execution_state: 'idle' }, ofCell());
    waiting.forEach(take => {
      take();
    });
  }

  /** The network is gone. */
  lose(): void {
    this.isReachable = false;
    [...this.sockets].forEach(socket => {
      socket.onclose({ code: 1006 });
    });
  }

  take(socket: FakeSocket, message: Message): void {
    if (this.waiting !== null && message.channel === 'shell') {
      this.waiting.push(() => {
        this.take(socket, message);
      });
      return;
    }
    const type = message.header.msg_type;
    if (type === 'comm_msg') {
      const { data } = message.content as { data: { op: string } };
      this.told.push({ channel: message.channel, data });
      return;
    }
    if (type === 'comm_info_request') {
      this.asked.push(message.channel);
    } else if (type === 'execute_request') {
      this.ran.push(message);
    }
    if (this.answers) {
      this.publish('status', { execution_state: 'busy' }, message);
      socket.say(message.channel, type.replace('request', 'reply'), this.reply(type), message);
      this.publish('status', { execution_state: 'idle' }, message);
    }
  }

  private reply(type: string): object {
    switch (type) {
      case 'comm_info_request':
        return { status: 'ok', comms: this.hasHub ? { nbguard: { target_name: 'nbguard' } } : {} };
      case 'execute_request':
        return { execution_count: 0, ...this.loading() };
      default:
        return { status: 'ok', protocol_version: '5.4', implementation: '', implementation_version: '', banner: '', help_links: [], language_info: { name: this.language, version: '3', mimetype: '', file_extension: '.py' } };
    }
  }
}

/** The browser's WebSocket, as far as JupyterLab uses it. */
export class FakeSocket {
  protocol = '';
  onopen: (event: object) => void = () => undefined;
  onmessage: (event: { data: string }) => void = () => undefined;
  onclose: (event: object) => void = () => undefined;
  onerror: (event: object) => void = () => undefined;

  constructor(private readonly kernel: FakeKernel) {
    kernel.sockets.add(this);
    queueMicrotask(() => {
      if (kernel.isReachable) {
        this.onopen({});
      } else {
        this.onclose({ code: 1006 });
      }
    });
  }

  send(data: string): void {
    this.kernel.take(this, JSON.parse(data) as Message);
  }

  close(): void {
    this.kernel.sockets.delete(this);
  }

  say(channel: string, msgType: string, content: object, parent?: Message): void {
    const header = { msg_id: crypto.randomUUID(), msg_type: msgType, session: 'kernel', username: '', date: '', version: '5.4' };
    this.onmessage({ data: JSON.stringify({ channel, header, parent_header: parent?.header ?? {}, metadata: {}, content, buffers: [] }) });
  }
}
