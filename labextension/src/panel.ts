import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import type { FrontKernel } from './follow';
import { memoryIcon } from './icon';
import { KernelLink } from './link';
import type { OtherNotebooks } from './others';
import type { Host, Model } from './view/host';
import type { View } from './view/view';

type ViewModule = typeof import('./styled_view');

/** The view's code is a file of its own: a page whose panel is closed does not load it. The same promise each time. */
export const loadView = (): Promise<ViewModule> => import('./styled_view');

/**
 * The sidebar. It draws the kernel in front while it can be seen; hidden, it asks nothing of any kernel.
 *
 * Each kernel has a view of its own, which rests while it is not shown: a plan that was open is there again with it.
 */
export class MemoryPanel extends Widget {
  /** `makeOthers` makes the list of the other notebooks of this server, of a class that comes with the view. */
  constructor(front: FrontKernel, trans: TranslationBundle, makeOthers: (made: ViewModule['OtherNotebooks']) => OtherNotebooks) {
    super();
    this.#makeOthers = makeOthers;
    this.#front = front;
    this.#trans = trans;
    this.id = 'nbguard-panel';
    this.addClass('nbguard-panel');
    this.node.tabIndex = -1;
    this.title.icon = memoryIcon;
    this.title.caption = trans.__('GPU memory');
    front.changed.connect(this.#draw);
    window.addEventListener('pagehide', this.#erase); // so that the kernel is told
    window.addEventListener('pageshow', this.#draw);
  }

  /** Whether it has been seen since the page was loaded. */
  get wasSeen(): boolean {
    return this.#seen;
  }

  /** Take the keyboard, also from where a command palette puts it back. The panel that opens by itself does not. */
  async focus(): Promise<void> {
    await new Promise(requestAnimationFrame);
    this.node.focus();
  }

  /** Have the view show its plan to clean what is stale, as a click on its button does. */
  async planCleaning(): Promise<void> {
    await this.#drawn;
    this.#shown?.planCleaning();
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this.#erase();
    this.#front.changed.disconnect(this.#draw);
    window.removeEventListener('pagehide', this.#erase);
    window.removeEventListener('pageshow', this.#draw);
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this.#draw();
  }

  protected override onAfterShow(): void {
    this.#draw();
  }

  protected override onBeforeHide(): void {
    this.#erase();
  }

  protected override onBeforeDetach(): void {
    this.#erase();
  }

  readonly #draw = (): void => {
    this.#erase();
    if (this.isVisible) {
      this.#seen = true;
      this.#drawn = loadView().then(views => { this.#show(views); });
    }
  };

  /** Show what is in front now, unless the panel has been hidden meanwhile. */
  #show(views: ViewModule): void {
    if (this.isVisible) {
      this.#erase();
      this.#others ??= this.#makeOthers(views.OtherNotebooks);
      this.#shown = this.#viewOf(views, this.#front.current);
      this.node.append(this.#shown.node);
      this.#shown.open();
      this.#others.watch();
    }
  }

  readonly #erase = (): void => {
    this.#others?.rest();
    this.#shown?.rest();
    this.#shown?.node.remove();
    this.#shown = null;
  };

  #viewOf(views: ViewModule, model: Model): View {
    const view = this.#views.get(model) ?? new views.View(model, this.#host(model));
    this.#views.set(model, view);
    return view;
  }

  #host(link: Model): Host {
    const trans = this.#trans;
    const goToCell = (cell: number, id?: string): boolean => this.#front.goToCell(cell, id);
    const nameOf = (kernel: string): string | null => this.#front.nameOf(kernel);
    const others = this.#others;
    return {
      trans,
      ...(link instanceof KernelLink && { goToCell, nameOf, load: (everywhere: boolean) => void link.load(everywhere) }),
      ...(others && { others: () => others.list(), goToNotebook: (kernel: string) => { others.show(kernel); } })
    };
  }

  readonly #front: FrontKernel;
  readonly #makeOthers: (made: ViewModule['OtherNotebooks']) => OtherNotebooks;
  #others: OtherNotebooks | null = null;
  readonly #trans: TranslationBundle;
  readonly #views = new WeakMap<Model, View>();
  #shown: View | null = null;
  #drawn: Promise<void> = Promise.resolve();
  #seen = false;
}
