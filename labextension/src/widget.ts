/** The view as an anywidget module, for `nbguard.Sidebar()` in an output cell. */

import { render, type Model } from './view/index';

export default {
  render: ({ model, el }: { model: Model; el: HTMLElement }): (() => void) => render({ model, el })
};
