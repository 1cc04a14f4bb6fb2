import type { ServiceManager } from '@jupyterlab/services';
import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import { Token } from '@lumino/coreutils';

import type { Channel } from './kernel_sender';
import { KernelLink } from './link';

type Services = Pick<ServiceManager.IManager, 'sessions' | 'kernels'>;

/** A notebook that the page is opening: its path, and a link to the kernel that it has already. */
export interface Opening {
  path: string;
  link: KernelLink;
}

/** What has begun before JupyterLab can open notebooks: about a second earlier, on a page that loads. */
export interface Head {
  /** Null: there are no settings, or without a schema. Everything works by default then. */
  stored: ISettingRegistry.ISettings | null;
  /** Null: the page's address names no notebook, or one that has no kernel yet. */
  opening: Promise<Opening | null>;
}

export const IHead = new Token<Head>('nbguard:IHead');

/** In the session's storage of this tab: the panel could be seen when the page was left. */
const OPEN = 'nbguard:open';

/** The notebook that the page's address names, and its kernel, as soon as the server has listed its sessions. */
export async function openingOf({ sessions, kernels }: Services, address: string, channel: () => Channel): Promise<Opening | null> {
  await sessions.ready;
  const page = decodeURIComponent(address);
  for (const { path, kernel } of sessions.running()) {
    if (kernel && (page.endsWith(`/tree/${path}`) || page.endsWith(`/notebooks/${path}`))) {
      const connection = kernels.connectTo({ model: kernel, handleComms: false });
      return { path, link: new KernelLink(connection, channel, path.split('/').pop() ?? path) };
    }
  }
  return null;
}

/** Whether the panel could be seen when this tab left the page before. */
export function wasOpen(): boolean {
  return sessionStorage.getItem(OPEN) !== null;
}

/** Note when the page is left whether the panel can be seen. */
export function noteOpen(isOpen: () => boolean): void {
  window.addEventListener('pagehide', () => {
    if (isOpen()) {
      sessionStorage.setItem(OPEN, '1');
    } else {
      sessionStorage.removeItem(OPEN);
    }
  });
}
