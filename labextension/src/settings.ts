import type { ISettingRegistry } from '@jupyterlab/settingregistry';

import type { Channel } from './kernel_sender';

/** The settings of schema/plugin.json, by their names there. */
export interface Settings {
  side: 'left' | 'right';
  openOnData: boolean;
  statusBar: boolean;
  lintMarks: boolean;
  channel: Channel;
}

const DEFAULTS: Settings = { side: 'right', openOnData: true, statusBar: true, lintMarks: true, channel: 'control' };

/** The settings as they are now; each is its default where there is none. */
export function read(stored: ISettingRegistry.ISettings | null): Settings {
  return { ...DEFAULTS, ...(stored?.composite as Partial<Settings> | undefined) };
}
