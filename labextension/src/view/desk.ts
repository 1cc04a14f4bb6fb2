/** What every section of the view works with. */

import type { Connection } from './connection';
import type { Errands } from './errands';
import type { Trans } from './words';

export interface Desk {
  readonly trans: Trans;
  readonly connection: Connection;
  readonly errands: Errands;
}
