/** The bar of actions at the bottom. */

import { isBehind, isLooked } from './as_of';
import { formatBytes } from './bytes';
import type { ViewContext } from './view_context';
import { button, element, setAttribute, setEnabled, setText, show } from './dom';
import type { OperationRequest } from './operations';
import { Menu } from './menu';
import type { Tick } from './protocol';

/** Parts of a device of which emptying the cache may give something back. */
const CACHED: ReadonlySet<string> = new Set(['releasable', 'cached']);

export class ActionBar {
  readonly node = element('div', 'actions');
  readonly #clean: HTMLButtonElement;
  readonly #flush: HTMLButtonElement;
  readonly #cleanStale: OperationRequest;
  readonly #emptyCache: OperationRequest;
  /** Whether PyTorch keeps anything that emptying its cache could give back. */
  #hasCache = false;
  /** Cells have ended since the last look. */
  #isBehind = false;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    const { trans, operations } = context;
    this.#cleanStale = { action: 'clean_stale', title: trans.__('Clean stale') };
    this.#emptyCache = { action: 'empty_cache', title: trans.__('Empty cache') };
    this.#clean = button('primary', '', () => {
      operations.start(this.#cleanStale);
    });
    this.#flush = button('', '', () => {
      operations.start(this.#emptyCache);
    });
    const menu = new Menu(trans.__('More actions'), [
      [
        trans.__('Stop workers'),
        () => {
          operations.start({ action: 'stop_workers', title: trans.__('Stop workers') });
        }
      ],
      [
        trans.__('Refresh'),
        () => {
          context.connection.ask({ op: 'refresh' }, () => undefined);
        }
      ]
    ]);
    this.node.append(this.#clean, this.#flush, menu.node);
  }

  planCleaning(): void {
    this.#clean.click();
  }

  /** Take what a tick says about the cache, and whether cells have ended since the last look. */
  follow(tick: Tick): void {
    const behind = isBehind(this.#context.connection.heap, tick);
    show(this.#flush, tick.tracked !== 'cpu' && tick.tracked !== 'simulated'); // PyTorch has no cache of its own there
    const hasCache = tick.devices.some(device => device.parts.some(part => CACHED.has(part.name) && part.nbytes > 0));
    if (hasCache !== this.#hasCache || behind !== this.#isBehind) {
      this.#hasCache = hasCache;
      this.#isBehind = behind;
      this.update();
    }
  }

  update(): void {
    const { trans, operations, connection } = this.#context;
    const stale = connection.heap?.stale ?? 0;
    const { title } = this.#cleanStale;
    const isCleaning = operations.isPending(this.#cleanStale);
    const isKnown = connection.heap?.during === null && !this.#isBehind;
    const known = isKnown ? trans.__('Nothing is stale') : trans.__('Nothing is known to be stale');
    const nothing = isLooked(connection.heap) ? known : trans.__('Not looked at yet');
    const words = stale > 0 ? `${title} · ${formatBytes(stale)}` : nothing;
    setText(this.#clean, isCleaning ? trans.__('working…') : words);
    setAttribute(this.#clean, 'aria-label', stale > 0 && !isCleaning ? null : `${title}: ${this.#clean.textContent}`);
    setEnabled(this.#clean, stale > 0 && !isCleaning);
    const isFlushing = operations.isPending(this.#emptyCache);
    setText(this.#flush, isFlushing ? trans.__('working…') : this.#emptyCache.title);
    setAttribute(this.#flush, 'aria-label', isFlushing ? `${this.#emptyCache.title}: ${trans.__('working…')}` : null);
    setAttribute(this.#flush, 'title', this.#hasCache ? null : trans.__('PyTorch keeps no free memory of a GPU'));
    setEnabled(this.#flush, this.#hasCache && !isFlushing);
  }
}
