import type { NotebookPanel } from '@jupyterlab/notebook';
import { KernelMessage } from '@jupyterlab/services';

import { COMM } from './kernel_sender';

/** Milliseconds after a cell's end until the hub is asked: another cell may begin, and the hub looks at the heap first. */
const SETTLED = 1000;

/** What asks the hub about a notebook, and takes what the hub says. */
interface Asker {
  /** The state of saving at which it asks, too. */
  readonly saving: 'started' | 'completed';
  ask: () => void;
  take: (answer: unknown) => void;
}

/** Have it ask when cells of a notebook have ended and when that is saved. Returns what ends this. */
export function afterCells({ context, sessionContext }: NotebookPanel, { saving, ask, take }: Asker): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const onMessage = (_: unknown, message: KernelMessage.IMessage): void => {
    if (KernelMessage.isCommMsgMsg(message) && message.content.comm_id === COMM) {
      take(message.content.data);
    } else if (KernelMessage.isStatusMsg(message) && 'msg_type' in message.parent_header) {
      if (message.parent_header.msg_type === 'execute_request') {
        clearTimeout(timer);
        timer = message.content.execution_state === 'idle' ? setTimeout(ask, SETTLED) : undefined;
      }
    }
  };
  const onSave = (_: unknown, state: string): void => {
    if (state === saving) {
      ask();
    }
  };
  sessionContext.iopubMessage.connect(onMessage);
  context.saveState.connect(onSave);
  return () => {
    clearTimeout(timer);
    sessionContext.iopubMessage.disconnect(onMessage);
    context.saveState.disconnect(onSave);
  };
}
