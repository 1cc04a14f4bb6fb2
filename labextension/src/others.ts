import type { ServiceManager } from '@jupyterlab/services';
import { UUID } from '@lumino/coreutils';

import type { FrontKernel } from './follow';
import type { Channel } from './kernel_sender';
import { KernelLink } from './link';
import { own } from './status';
import type { OtherNotebook } from './view/host';
import { isTick } from './view/protocol';

type Services = Pick<ServiceManager.IManager, 'sessions' | 'kernels'>;

/** Milliseconds between two renewals of the leases, and of the list itself. */
const RENEW = 10_000;
const MOST = 8;

/** The notebooks of this server beside the one in front, of other tabs and browsers, too: asked for a figure while somebody looks. */
export class OtherNotebooks {
  /** `open` shows the notebook at a path. */
  constructor(front: FrontKernel, services: Services, channel: () => Channel, open: (path: string) => void) {
    this.#front = front;
    this.#services = services;
    this.#channel = channel;
    this.#open = open;
  }

  /** Look at their kernels from now on. */
  watch(): void {
    clearInterval(this.#timer);
    this.#timer = setInterval(this.#renew, RENEW);
    this.#renew();
  }

  /** Look no longer. */
  rest(): void {
    clearInterval(this.#timer);
    this.#links.forEach((link, kernel) => { this.#leave(kernel, link); });
    this.#links.clear();
  }

  /** Those whose kernels have nbguard and say what they hold. */
  list(): OtherNotebook[] {
    return this.#sessions().flatMap(({ kernel, path }) => {
      const tick = this.#links.get(kernel)?.get('tick');
      const nbytes = isTick(tick) ? tick.devices.reduce((sum, device) => sum + own(device), 0) : 0;
      return nbytes > 0 ? [{ kernel, name: path.split('/').pop() ?? path, nbytes }] : [];
    });
  }

  /** Show the notebook of a kernel. */
  show(kernel: string): void {
    const path = this.#sessions().find(each => each.kernel === kernel)?.path;
    if (path !== undefined) {
      this.#open(path);
    }
  }

  readonly #renew = (): void => {
    const listed = new Set(this.#sessions().map(({ kernel }) => kernel));
    for (const [kernel, link] of this.#links) {
      if (!listed.has(kernel) || link.isDisposed || (this.#front.linkTo(kernel) ?? link) !== link) {
        this.#leave(kernel, link);
        this.#links.delete(kernel);
      }
    }
    for (const kernel of listed) {
      const link = this.#links.get(kernel) ?? this.#linkTo(kernel);
      this.#links.set(kernel, link);
      link.glance(this.#client);
    }
  };

  /** The link that a notebook in this page has, or one of our own. */
  #linkTo(kernel: string): KernelLink {
    const known = this.#front.linkTo(kernel);
    if (known !== undefined) {
      return known;
    }
    const session = this.#sessions().find(each => each.kernel === kernel);
    const model = { id: kernel, name: session?.spec ?? '' };
    return new KernelLink(this.#services.kernels.connectTo({ model, handleComms: false }), this.#channel, session?.path ?? '');
  }

  #leave(kernel: string, link: KernelLink): void {
    if (!link.isDisposed) {
      link.endGlance(this.#client);
      if (this.#front.linkTo(kernel) !== link) {
        link.dispose();
      }
    }
  }

  /** Notebooks with a kernel, without the one in front. */
  #sessions(): { kernel: string; spec: string; path: string }[] {
    const front = this.#front.current instanceof KernelLink ? this.#front.current.kernel : '';
    const found = [...this.#services.sessions.running()].flatMap(({ kernel, path, type }) =>
      kernel && type === 'notebook' && kernel.id !== front ? [{ kernel: kernel.id, spec: kernel.name, path }] : []
    );
    return found.slice(0, MOST);
  }

  readonly #front: FrontKernel;
  readonly #services: Services;
  readonly #channel: () => Channel;
  readonly #open: (path: string) => void;
  readonly #client = UUID.uuid4();
  readonly #links = new Map<string, KernelLink>();
  #timer: ReturnType<typeof setInterval> | undefined;
}
