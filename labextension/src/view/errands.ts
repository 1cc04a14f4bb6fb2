/** What the reader has asked to be done, from the plan to the outcome. Knows no page. */

import type { Progress, Question } from './connection';
import type { ActionName, Job, OutcomeView, PlanView } from './protocol';

/** An action and what it is for. `title` names it while it waits. */
export interface Wanted {
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

export interface Errand {
  readonly wanted: Wanted;
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

/** What an errand needs of the connection. */
interface Line {
  ask(question: Question, heard: (progress: Progress) => void): string;
  cancel(rid: string): void;
}

export class Errands {
  /** What the last errand came to. */
  result: Result | null = null;

  private readonly errands = new Set<Errand>();

  constructor(
    private readonly line: Line,
    private readonly changed: () => void,
    private readonly lost: string
  ) {}

  /** The errand whose plan is on the table. */
  get open(): Errand | null {
    const isOnTable = (errand: Errand): boolean =>
      !errand.isCancelled && errand.plan !== null && errand.stage !== 'planning' && errand.phase === 'sent';
    return this.all().find(isOnTable) ?? null;
  }

  /** Errands that wait for more than an answer that is near. */
  get waiting(): Errand[] {
    return this.all().filter(errand => !errand.isCancelled && errand.phase !== 'sent');
  }

  /** Whether an errand for just this is under way. */
  isPending(wanted: Wanted): boolean {
    return this.all().some(
      errand => !errand.isCancelled && errand.stage !== 'deciding' && isSame(errand.wanted, wanted)
    );
  }

  start(wanted: Wanted): void {
    if (this.isPending(wanted)) {
      return;
    }
    const open = this.open;
    if (open !== null) {
      this.cancel(open);
    }
    const errand: Errand = {
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
    this.errands.add(errand);
    this.send(errand, planQuestion(wanted));
  }

  /** Leave a step of the open plan out, or take it in again: the plan is made anew. */
  toggle(errand: Errand, key: string, kept: boolean): void {
    if (errand.plan === null || errand.stage !== 'deciding') {
      return;
    }
    const rows = errand.plan.rows.map(row => (row.key === key ? { ...row, kept } : row));
    errand.plan = { ...errand.plan, token: '', rows };
    const keep = rows.filter(row => row.kept && row.key !== '').map(row => row.key);
    this.send(errand, { ...planQuestion(errand.wanted), keep });
  }

  confirm(errand: Errand): void {
    if (errand.stage === 'deciding' && errand.plan !== null && errand.plan.token !== '') {
      errand.stage = 'applying';
      this.send(errand, { op: 'apply', token: errand.plan.token });
    }
  }

  /** Give an errand up. If it was done all the same, its outcome is still told. */
  cancel(errand: Errand): void {
    if (errand.stage === 'deciding') {
      this.errands.delete(errand);
    } else {
      errand.isCancelled = true;
      this.line.cancel(errand.rid);
    }
    this.changed();
  }

  /** Cancel a job of another view. */
  cancelJob(rid: string): void {
    this.line.cancel(rid);
  }

  /** Take off the list what waited and is no longer among the kernel's `jobs`: another view has cancelled it. */
  reconcile(jobs: readonly Job[]): void {
    for (const errand of this.waiting) {
      const isListed = jobs.some(job => job.rid === errand.rid);
      errand.isCancelled = errand.isListed && !isListed;
      errand.isListed = isListed;
    }
  }

  isOwn(rid: string): boolean {
    return this.all().some(errand => errand.rid === rid);
  }

  /** Take the open plan and the last outcome off the table: the kernel that they are of is gone. */
  forget(): void {
    for (const errand of this.all()) {
      if (errand.stage === 'deciding') {
        this.errands.delete(errand);
      }
    }
    this.result = this.result?.kind === 'done' ? null : this.result;
  }

  dismiss(): void {
    this.result = null;
    this.changed();
  }

  private all(): Errand[] {
    return [...this.errands];
  }

  private send(errand: Errand, question: Question): void {
    errand.phase = 'sent';
    errand.isListed = false;
    const rid = this.line.ask(question, progress => {
      if (errand.rid === rid && this.errands.has(errand)) {
        this.hear(errand, progress);
        this.changed();
      }
    });
    errand.rid = rid;
    this.changed();
  }

  private hear(errand: Errand, progress: Progress): void {
    switch (progress.op) {
      case 'ack':
        errand.phase = errand.phase === 'late' ? 'working' : errand.phase;
        break;
      case 'late':
        errand.phase = 'late';
        break;
      case 'queued':
        errand.phase = 'queued';
        errand.why = progress.why;
        break;
      case 'plan':
        this.decide(errand, progress.plan);
        break;
      case 'done':
        this.finish(errand, { kind: 'done', outcome: progress.outcome });
        break;
      case 'refused':
        this.finish(errand, errand.isCancelled ? null : refused(errand, progress.why));
        break;
      case 'lost':
        this.finish(errand, errand.isCancelled ? null : refused(errand, this.lost));
        break;
      case 'why':
        break;
    }
  }

  private decide(errand: Errand, plan: PlanView): void {
    if (errand.isCancelled) {
      this.errands.delete(errand);
      return;
    }
    errand.isRevised = errand.stage === 'applying';
    errand.stage = 'deciding';
    errand.phase = 'sent';
    errand.plan = plan;
    this.result = null;
  }

  private finish(errand: Errand, result: Result | null): void {
    this.errands.delete(errand);
    this.result = result ?? this.result;
  }
}

function planQuestion({ action, heap, ids, names }: Wanted): Extract<Question, { op: 'plan' }> {
  return {
    op: 'plan',
    action,
    ...(heap === undefined ? {} : { heap }),
    ...(ids === undefined ? {} : { ids }),
    ...(names === undefined ? {} : { names })
  };
}

function isSame(a: Wanted, b: Wanted): boolean {
  return a.action === b.action && String(a.ids) === String(b.ids) && String(a.names) === String(b.names);
}

function refused(errand: Errand, why: string): Result {
  return { kind: 'refused', title: errand.wanted.title, why };
}
