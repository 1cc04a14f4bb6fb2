/** The bar of actions at the bottom. */

import { formatBytes } from './bytes';
import type { Desk } from './desk';
import { button, element, setAttribute, setEnabled, setText } from './dom';
import type { Wanted } from './errands';
import { Menu } from './menu';

export class ActionBar {
  readonly node = element('div', 'nbguard-actions');
  private readonly clean: HTMLButtonElement;
  private readonly flush: HTMLButtonElement;
  private readonly cleanStale: Wanted;
  private readonly emptyCache: Wanted;

  constructor(private readonly desk: Desk) {
    const { trans, errands } = desk;
    this.cleanStale = { action: 'clean_stale', title: trans.__('Clean stale') };
    this.emptyCache = { action: 'empty_cache', title: trans.__('Empty cache') };
    this.clean = button('nbguard-primary', '', () => {
      errands.start(this.cleanStale);
    });
    this.flush = button('', '', () => {
      errands.start(this.emptyCache);
    });
    const menu = new Menu(trans.__('More actions'), [
      [
        trans.__('Stop workers'),
        () => {
          errands.start({ action: 'stop_workers', title: trans.__('Stop workers') });
        }
      ],
      [
        trans.__('Refresh'),
        () => {
          desk.connection.ask({ op: 'refresh' }, () => undefined);
        }
      ]
    ]);
    this.node.append(this.clean, this.flush, menu.node);
  }

  planCleaning(): void {
    this.clean.click();
  }

  update(): void {
    const { trans, errands, connection } = this.desk;
    const stale = connection.heap?.stale ?? 0;
    const { title } = this.cleanStale;
    const isCleaning = errands.isPending(this.cleanStale);
    const words = stale > 0 ? `${title} · ${formatBytes(stale)}` : trans.__('Nothing is stale');
    setText(this.clean, isCleaning ? trans.__('working…') : words);
    setAttribute(this.clean, 'aria-label', stale > 0 && !isCleaning ? null : `${title}: ${this.clean.textContent}`);
    setEnabled(this.clean, stale > 0 && !isCleaning);
    const isFlushing = errands.isPending(this.emptyCache);
    setText(this.flush, isFlushing ? trans.__('working…') : this.emptyCache.title);
    setAttribute(this.flush, 'aria-label', isFlushing ? `${this.emptyCache.title}: ${trans.__('working…')}` : null);
    setEnabled(this.flush, !isFlushing);
  }
}
