import { showErrorMessage } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import type { FrontKernel } from './follow';
import { memoryIcon } from './icon';
import { KernelLink } from './link';
import type { Host, Model } from './view/protocol';
import { View } from './view/view';

/**
 * The sidebar. It draws the kernel in front while it can be seen; hidden, it asks nothing of any kernel.
 *
 * Each kernel has a view of its own, which rests while it is not shown: a plan that was open is there again with it.
 */
export class MemoryPanel extends Widget {
  constructor(front: FrontKernel, trans: TranslationBundle) {
    super();
    this._front = front;
    this._trans = trans;
    this.id = 'nbguard-panel';
    this.addClass('nbguard-panel');
    this.node.tabIndex = -1;
    this.title.icon = memoryIcon;
    this.title.caption = trans.__('GPU memory');
    front.changed.connect(this._draw);
    window.addEventListener('pagehide', this._erase); // so that the kernel is told
    window.addEventListener('pageshow', this._draw);
  }

  /** Whether it has been seen since the page was loaded. */
  get wasSeen(): boolean {
    return this._wasSeen;
  }

  /** Take the keyboard, also from where a command palette puts it back. The panel that opens by itself does not. */
  focus(): void {
    requestAnimationFrame(() => {
      this.node.focus();
    });
  }

  /** Have the view show its plan to clean what is stale, as a click on its button does. */
  planCleaning(): void {
    this._shown?.planCleaning();
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._erase();
    this._front.changed.disconnect(this._draw);
    window.removeEventListener('pagehide', this._erase);
    window.removeEventListener('pageshow', this._draw);
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this._draw();
  }

  protected override onAfterShow(): void {
    this._draw();
  }

  protected override onBeforeHide(): void {
    this._erase();
  }

  protected override onBeforeDetach(): void {
    this._erase();
  }

  private readonly _draw = (): void => {
    this._erase();
    if (this.isVisible) {
      this._wasSeen = true;
      this._shown = this._viewOf(this._front.current);
      this.node.append(this._shown.node);
      this._shown.open();
    }
  };

  private readonly _erase = (): void => {
    this._shown?.rest();
    this._shown?.node.remove();
    this._shown = null;
  };

  private _viewOf(model: Model): View {
    const view = this._views.get(model) ?? new View(model, this._host(model));
    this._views.set(model, view);
    return view;
  }

  private _host(link: Model): Host {
    const trans = this._trans;
    return link instanceof KernelLink ? { trans, load: () => void this._load(link) } : { trans };
  }

  private async _load(link: KernelLink): Promise<void> {
    const problem = await link.load();
    if (problem) {
      await showErrorMessage(this._trans.__('nbguard could not be loaded'), problem);
    }
  }

  private readonly _front: FrontKernel;
  private readonly _trans: TranslationBundle;
  private readonly _views = new WeakMap<Model, View>();
  private _shown: View | null = null;
  private _wasSeen = false;
}
