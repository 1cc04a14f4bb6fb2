/** What the reader has asked to be done, from the plan to the outcome. Knows no page. */

import type { Progress, Question } from './connection';
import type { ActionName, JobStatus, OutcomeView, PlanView } from './protocol';

/** An action and what it is for. `title` names it while it waits. */
export interface OperationRequest {
  action: ActionName;
  title: string;
  heap?: number;
  ids?: number[];
  names?: string[];
}

/** `planning`: the plan is awaited; `deciding`: it is shown; `applying`: it was agreed to. */
export type Stage = 'planning' | 'deciding' | 'applying';

/** `sent`: an answer is near; `late`: no ack; `queued`: it waits, `why` says what for; `working`: it is no longer late. */
export type Phase = 'sent' | 'late' | 'queued' | 'working';

export interface Operation {
  readonly wanted: OperationRequest;
  stage: Stage;
  phase: Phase;
  why: string;
  rid: string;
  plan: PlanView | null;
  /** The kernel has listed it among its jobs. */
  isListed: boolean;
  /** Another plan than the one that was agreed to. */
  isRevised: boolean;
  isCancelled: boolean;
}

export type Result = { kind: 'done'; outcome: OutcomeView } | { kind: 'refused'; title: string; why: string };

/** What an operation needs of the connection. */
interface RequestPort {
  ask(question: Question, heard: (progress: Progress) => void): string;
  cancel(rid: string): void;
}

export class Operations {
  /** What the last operation came to. */
  result: Result | null = null;

  readonly #operations = new Set<Operation>();

  readonly #port: RequestPort;
  readonly #changed: () => void;
  readonly #lost: string;

  constructor(
    port: RequestPort,
    changed: () => void,
    lost: string
  ) {
    this.#port = port;
    this.#changed = changed;
    this.#lost = lost;
  }

  /** The operation whose plan is on the table. */
  get open(): Operation | null {
    const isOnTable = (operation: Operation): boolean =>
      !operation.isCancelled && operation.plan !== null && operation.stage !== 'planning' && operation.phase === 'sent';
    return this.#all().find(isOnTable) ?? null;
  }

  /** Operations that wait for more than an answer that is near. */
  get waiting(): Operation[] {
    return this.#all().filter(operation => !operation.isCancelled && operation.phase !== 'sent');
  }

  /** Whether an operation for just this is under way. */
  isPending(wanted: OperationRequest): boolean {
    return this.#all().some(
      operation => !operation.isCancelled && operation.stage !== 'deciding' && isSame(operation.wanted, wanted)
    );
  }

  start(wanted: OperationRequest): void {
    if (this.isPending(wanted)) {
      return;
    }
    const open = this.open;
    if (open !== null) {
      this.cancel(open);
    }
    const operation: Operation = {
      wanted,
      stage: 'planning',
      phase: 'sent',
      why: '',
      rid: '',
      plan: null,
      isListed: false,
      isRevised: false,
      isCancelled: false
    };
    this.#operations.add(operation);
    this.#send(operation, planQuestion(wanted));
  }

  /** Leave a step of the open plan out, or take it in again: the plan is made anew. */
  toggle(operation: Operation, key: string, kept: boolean): void {
    if (operation.plan === null || operation.stage !== 'deciding') {
      return;
    }
    const rows = operation.plan.rows.map(row => (row.key === key ? { ...row, kept } : row));
    operation.plan = { ...operation.plan, token: '', rows };
    const keep = rows.filter(row => row.kept && row.key !== '').map(row => row.key);
    this.#send(operation, { ...planQuestion(operation.wanted), keep });
  }

  confirm(operation: Operation): void {
    if (operation.stage === 'deciding' && operation.plan !== null && operation.plan.token !== '') {
      operation.stage = 'applying';
      this.#send(operation, { op: 'apply', token: operation.plan.token });
    }
  }

  /** Give an operation up. If it was done all the same, its outcome is still told. */
  cancel(operation: Operation): void {
    if (operation.stage === 'deciding') {
      this.#operations.delete(operation);
    } else {
      operation.isCancelled = true;
      this.#port.cancel(operation.rid);
    }
    this.#changed();
  }

  /** Cancel a job of another view. */
  cancelJob(rid: string): void {
    this.#port.cancel(rid);
  }

  /** Take off the list what waited and is no longer among the kernel's `jobs`: another view has cancelled it. */
  reconcile(jobs: readonly JobStatus[]): void {
    for (const operation of this.waiting) {
      const isListed = jobs.some(job => job.rid === operation.rid);
      operation.isCancelled = operation.isListed && !isListed;
      operation.isListed = isListed;
    }
  }

  isOwn(rid: string): boolean {
    return this.#all().some(operation => operation.rid === rid);
  }

  /** Take the open plan and the last outcome off the table: the kernel that they are of is gone. */
  forget(): void {
    for (const operation of this.#all()) {
      if (operation.stage === 'deciding') {
        this.#operations.delete(operation);
      }
    }
    this.result = this.result?.kind === 'done' ? null : this.result;
  }

  dismiss(): void {
    this.result = null;
    this.#changed();
  }

  #all(): Operation[] {
    return [...this.#operations];
  }

  #send(operation: Operation, question: Question): void {
    operation.phase = 'sent';
    operation.isListed = false;
    const rid = this.#port.ask(question, progress => {
      if (operation.rid === rid && this.#operations.has(operation)) {
        this.#hear(operation, progress);
        this.#changed();
      }
    });
    operation.rid = rid;
    this.#changed();
  }

  #hear(operation: Operation, progress: Progress): void {
    switch (progress.op) {
      case 'ack':
        operation.phase = operation.phase === 'late' ? 'working' : operation.phase;
        break;
      case 'late':
        operation.phase = 'late';
        break;
      case 'queued':
        operation.phase = 'queued';
        operation.why = progress.why;
        break;
      case 'plan':
        this.#decide(operation, progress.plan);
        break;
      case 'done':
        this.#finish(operation, { kind: 'done', outcome: progress.outcome });
        break;
      case 'refused':
        this.#finish(operation, operation.isCancelled ? null : refused(operation, progress.why));
        break;
      case 'lost':
        this.#finish(operation, operation.isCancelled ? null : refused(operation, this.#lost));
        break;
      default: // answers to questions about a row
        break;
    }
  }

  #decide(operation: Operation, plan: PlanView): void {
    if (operation.isCancelled) {
      this.#operations.delete(operation);
      return;
    }
    operation.isRevised = operation.stage === 'applying';
    operation.stage = 'deciding';
    operation.phase = 'sent';
    operation.plan = plan;
    this.result = null;
  }

  #finish(operation: Operation, result: Result | null): void {
    this.#operations.delete(operation);
    this.result = result ?? this.result;
  }
}

function planQuestion({ action, heap, ids, names }: OperationRequest): Extract<Question, { op: 'plan' }> {
  return {
    op: 'plan',
    action,
    ...(heap === undefined ? {} : { heap }),
    ...(ids === undefined ? {} : { ids }),
    ...(names === undefined ? {} : { names })
  };
}

function isSame(a: OperationRequest, b: OperationRequest): boolean {
  return a.action === b.action && String(a.ids) === String(b.ids) && String(a.names) === String(b.names);
}

function refused(operation: Operation, why: string): Result {
  return { kind: 'refused', title: operation.wanted.title, why };
}
