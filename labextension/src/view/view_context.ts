/** What every section of the view works with. */

import type { AsOf } from './as_of';
import type { Connection } from './connection';
import type { Host } from './host';
import type { Operations } from './operations';
import type { Trans } from './words';

export interface ViewContext {
  readonly trans: Trans;
  readonly connection: Connection;
  readonly operations: Operations;
  /** Labels with the date of the figures of the last look. */
  readonly asOf: AsOf;
  /** Show the cell with this number; false: the notebook has it no more. Undefined where the host has no cells. */
  readonly goToCell: Host['goToCell'];
}
