import type { TranslationBundle } from '@jupyterlab/translation';
import { UUID } from '@lumino/coreutils';
import { Widget } from '@lumino/widgets';

import type { FrontKernel } from './follow';
import { KernelLink } from './link';
import { Approach, availableOf } from './view/approach';
import { formatBytes, formatColumn, unitOf } from './view/bytes';
import type { Model } from './view/host';
import { isTick, type DeviceTick, type Tick } from './view/protocol';

/** The lease of the item, in milliseconds between two renewals: the kernel sends a tick every 5 s meanwhile. */
const RENEW = 10_000;

/** The item of the status bar: how full the device of the notebook in front is. Empty where nbguard is not loaded. */
export class StatusItem extends Widget {
  /** `toggle` shows the panel, or hides it. */
  constructor(front: FrontKernel, trans: TranslationBundle, toggle: () => void) {
    super();
    this.#front = front;
    this.#trans = trans;
    this.#approach = new Approach(trans);
    this.addClass('nbguard-status-item');
    this.#button.type = 'button';
    this.#button.addEventListener('click', toggle);
    this.node.append(this.#button);
    front.changed.connect(this.#follow);
    document.addEventListener('visibilitychange', this.#follow);
    this.#follow();
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this.#leave();
      this.#front.changed.disconnect(this.#follow);
      document.removeEventListener('visibilitychange', this.#follow);
      super.dispose();
    }
  }

  /** Take the kernel that is in front now; none while the page cannot be seen. */
  readonly #follow = (): void => {
    this.#leave();
    const model = this.#front.current;
    if (model instanceof KernelLink && document.visibilityState === 'visible') {
      this.#link = model;
      model.on('change:tick', this.#draw);
      model.glance(this.#client);
      this.#timer = setInterval(() => { model.glance(this.#client); }, RENEW);
    }
    this.#draw();
  };

  #leave(): void {
    clearInterval(this.#timer);
    this.#link?.off('change:tick', this.#draw);
    this.#link?.endGlance(this.#client);
    this.#link = null;
  }

  readonly #draw = (): void => {
    const tick = (this.#link as Model | null)?.get('tick');
    const words = isTick(tick) ? this.#words(tick) : '';
    this.node.hidden = words === '';
    const warning = isTick(tick) ? this.#approach.follow(tick) : '';
    this.toggleClass('nbguard-warn', warning !== '');
    if (this.#button.textContent !== words) {
      this.#button.textContent = words;
    }
    this.#button.title = warning || (isTick(tick) ? this.#meaning(tick) : '');
  };

  /** What the figures are of. */
  #meaning({ tracked, devices }: Tick): string {
    if (tracked === 'cpu') {
      return this.#trans.__('Host memory in use by the kernel of this notebook, which has no GPU. A click shows or hides the panel.');
    }
    const [device] = [...devices].sort((a, b) => own(b) - own(a));
    return tracked === 'simulated'
      ? this.#trans.__('Memory in use on the simulated GPU. A click shows or hides the panel.')
      : this.#trans.__('GPU memory in use on %1, by all processes. A click shows or hides the panel.', device?.device ?? '');
  }

  /** `cuda:0 3.2 / 8 GiB`: of the device that this kernel holds most of; without a GPU `host memory 272 MiB`. */
  #words(tick: Tick): string {
    const [device] = [...tick.devices].sort((a, b) => own(b) - own(a));
    if (device === undefined) {
      return '';
    }
    const available = availableOf(device);
    if (available === null || device.total === null) {
      const name = tick.tracked === 'cpu' ? this.#trans.__('host memory') : device.device;
      return own(device) === 0 ? '' : `${name} ${formatBytes(own(device))}`;
    }
    const unit = unitOf(device.total);
    const free = device.parts.find(part => part.name === 'free')?.nbytes ?? 0;
    const [used = '', total = ''] = [device.total - free, device.total].flatMap(nbytes => formatColumn([nbytes], unit));
    return `${device.device} ${used.split(' ', 1)[0] ?? ''} / ${total}`;
  }

  readonly #front: FrontKernel;
  readonly #trans: TranslationBundle;
  readonly #approach: Approach;
  readonly #button = document.createElement('button');
  readonly #client = UUID.uuid4();
  #link: KernelLink | null = null;
  #timer: ReturnType<typeof setInterval> | undefined;
}

/** Bytes that this kernel holds of a device. */
export function own(device: DeviceTick): number {
  const [first] = device.parts;
  return first?.nbytes ?? 0;
}
