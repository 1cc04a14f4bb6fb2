/** What every section of the view works with. */

import type { Connection } from './connection';
import type { Operations } from './operations';
import type { Trans } from './words';

export interface ViewContext {
  readonly trans: Trans;
  readonly connection: Connection;
  readonly operations: Operations;
}
