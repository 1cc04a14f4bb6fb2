/** The outputs of nbguard's widgets in a notebook: a widget's view, and its picture in HTML for where the widget is gone. */

import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';

import { KernelSender } from './kernel_sender';
import { isObject } from './view/check';

export type Renderer = ReturnType<NotebookPanel['content']['rendermime']['createRenderer']>;
export type MimeModel = Parameters<Renderer['renderModel']>[0];

/** What marks such an output: `{ model_id }` of the widget, and `picture: 'own'` where it is none of the sidebar's. */
export const SIDEBAR = 'application/vnd.nbguard.frontend.sidebar+json';
export const HTML = 'text/html';
const WIDGETS = 'jupyter.widget';

/** The widget's id in an output's data; null: it is no output of `nbguard.Sidebar()`. */
export function sidebarOf({ [SIDEBAR]: shown }: MimeModel['data']): string | null {
  return isObject(shown) && typeof shown.model_id === 'string' ? shown.model_id : null;
}

/** Whether an output's picture shows another widget than the sidebar, such as a moment of a history: it stays as it is. */
export function hasOwnPicture({ [SIDEBAR]: shown }: MimeModel['data']): boolean {
  return isObject(shown) && shown.picture === 'own';
}

/** The widgets that a kernel has, by id. Asked on the control channel, as the cell that shows one may still run. */
export async function widgetsOf(kernel: Kernel.IKernelConnection): Promise<object> {
  return new KernelSender(kernel, () => 'control').comms(WIDGETS).catch(() => ({}));
}
