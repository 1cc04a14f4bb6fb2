import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import type { FrontKernel } from './follow';
import { memoryIcon } from './icon';
import { KernelLink } from './link';
import type { Host, Model } from './view/host';
import { View } from './view/view';

/**
 * The sidebar. It draws the kernel in front while it can be seen; hidden, it asks nothing of any kernel.
 *
 * Each kernel has a view of its own, which rests while it is not shown: a plan that was open is there again with it.
 */
export class MemoryPanel extends Widget {
  constructor(front: FrontKernel, trans: TranslationBundle) {
    super();
    this.front = front;
    this.trans = trans;
    this.id = 'nbguard-panel';
    this.addClass('nbguard-panel');
    this.node.tabIndex = -1;
    this.title.icon = memoryIcon;
    this.title.caption = trans.__('GPU memory');
    front.changed.connect(this.draw);
    window.addEventListener('pagehide', this.erase); // so that the kernel is told
    window.addEventListener('pageshow', this.draw);
  }

  /** Whether it has been seen since the page was loaded. */
  get wasSeen(): boolean {
    return this.seen;
  }

  /** Take the keyboard, also from where a command palette puts it back. The panel that opens by itself does not. */
  focus(): void {
    requestAnimationFrame(() => {
      this.node.focus();
    });
  }

  /** Have the view show its plan to clean what is stale, as a click on its button does. */
  planCleaning(): void {
    this.shown?.planCleaning();
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this.erase();
    this.front.changed.disconnect(this.draw);
    window.removeEventListener('pagehide', this.erase);
    window.removeEventListener('pageshow', this.draw);
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this.draw();
  }

  protected override onAfterShow(): void {
    this.draw();
  }

  protected override onBeforeHide(): void {
    this.erase();
  }

  protected override onBeforeDetach(): void {
    this.erase();
  }

  private readonly draw = (): void => {
    this.erase();
    if (this.isVisible) {
      this.seen = true;
      this.shown = this.viewOf(this.front.current);
      this.node.append(this.shown.node);
      this.shown.open();
    }
  };

  private readonly erase = (): void => {
    this.shown?.rest();
    this.shown?.node.remove();
    this.shown = null;
  };

  private viewOf(model: Model): View {
    const view = this.views.get(model) ?? new View(model, this.host(model));
    this.views.set(model, view);
    return view;
  }

  private host(link: Model): Host {
    const trans = this.trans;
    const goToCell = (cell: number): boolean => this.front.goToCell(cell);
    const nameOf = (kernel: string): string | null => this.front.nameOf(kernel);
    return link instanceof KernelLink ? { trans, goToCell, nameOf, load: () => void link.load() } : { trans };
  }

  private readonly front: FrontKernel;
  private readonly trans: TranslationBundle;
  private readonly views = new WeakMap<Model, View>();
  private shown: View | null = null;
  private seen = false;
}
