/** The whole view: header, sections that scroll, and below them what is asked, awaited and done. */

import { ActionBar } from './actions';
import { Approach } from './approach';
import { AsOf } from './as_of';
import { FindingsSection, OomSection } from './advice';
import { Connection, type Change } from './connection';
import type { ViewContext } from './view_context';
import { DeviceView, type DeviceItem } from './device';
import { element, KeyedList, setAttribute, setText, show } from './dom';
import { Operations } from './operations';
import { FitSection } from './fit';
import { FragmentationSection } from './fragmentation';
import { Header } from './header';
import { HistorySection } from './history';
import { HoldersSection } from './holders';
import { JobsPanel } from './jobs';
import { LineSource } from './line_source';
import { Neighbours } from './neighbours';
import { Notice } from './notice';
import { PlanPanel } from './plan';
import type { Host, Model } from './host';
import type { Tick } from './protocol';
import { ResultPanel } from './result';
import { watchVisibility } from './visibility';
import { caveat, english, type Trans } from './words';

export class View {
  readonly node = element('div', 'view');
  readonly #connection: Connection;
  readonly #operations: Operations;
  readonly #header: Header;
  readonly #notice: Notice;
  readonly #caveat = element('div', 'caveat dim');
  readonly #neighbours: Neighbours;
  readonly #warning = element('div', 'near-full');
  readonly #approach: Approach;
  readonly #content = element('div');
  readonly #dock = element('div', 'dock');
  readonly #devices: KeyedList<DeviceItem>;
  readonly #line: LineSource;
  readonly #asOf: AsOf;
  readonly #fragmentation: FragmentationSection;
  readonly #history: HistorySection;
  readonly #fit: FitSection;
  readonly #holders: HoldersSection;
  readonly #findings: FindingsSection;
  readonly #result: ResultPanel;
  readonly #ofHeap: readonly { readonly node: HTMLElement; update(heap: Connection['heap']): void }[];
  readonly #ofOperations: readonly { readonly node: HTMLElement; update(): void }[];
  readonly #actions: ActionBar;
  readonly #trans: Trans;
  /** The jobs of the kernel as the panels of operations show them: most ticks change nothing of these. */
  #drawnJobs = '';
  #unwatch: () => void = () => undefined;

  constructor(
    model: Model,
    host: Host
  ) {
    const trans = host.trans ?? english;
    this.#trans = trans;
    this.#connection = new Connection(model, what => {
      this.#update(what);
    });
    const operations = (this.#operations = new Operations(
      this.#connection,
      () => {
        this.#drawHeap();
        this.#drawOperations();
      },
      trans.__('The kernel was restarted.')
    ));
    this.#approach = new Approach(trans);
    this.#asOf = new AsOf(trans);
    const context: ViewContext = {
      trans,
      connection: this.#connection,
      operations,
      asOf: this.#asOf,
      goToCell: host.goToCell
    };
    this.#line = new LineSource(this.#connection, () => {
      this.#drawDevices();
    });
    const ofLine = { trans, source: this.#line, goToCell: host.goToCell };
    this.#header = new Header(trans);
    this.#notice = new Notice(trans, host);
    this.#neighbours = new Neighbours(trans, host);
    this.#fit = new FitSection(trans);
    const devices = element('div');
    this.#devices = new KeyedList<DeviceItem>(
      devices,
      ({ boot, device }) => `${boot} ${device.device}`,
      () => new DeviceView(ofLine)
    );
    const oom = new OomSection(context);
    this.#holders = new HoldersSection(context);
    this.#findings = new FindingsSection(context);
    this.#fragmentation = new FragmentationSection(trans);
    this.#history = new HistorySection(context);
    const below = [this.#holders, this.#findings, this.#fragmentation, this.#history];
    this.#asOf.date(this.#findings.node, this.#fragmentation.node);
    this.#ofHeap = [oom, ...below];
    this.#actions = new ActionBar(context);
    this.#result = new ResultPanel(context);
    this.#ofOperations = [new JobsPanel(context), new PlanPanel(context), this.#result, this.#actions];
    this.#content.append(this.#warning, this.#caveat, devices, this.#neighbours.node, oom.node, this.#fit.node, ...below.map(section => section.node));
    this.#dock.append(...this.#ofOperations.map(panel => panel.node));
    const body = element('div', 'body', this.#notice.node, this.#content);
    this.node.append(this.#header.node, body, this.#dock);
    this.node.setAttribute('role', 'region');
    const isPanel = host.goToCell !== undefined; // beside it there may be the same view in a cell
    this.node.setAttribute('aria-label', isPanel ? trans.__('GPU memory, panel') : trans.__('GPU memory'));
    this.node.addEventListener('keydown', event => {
      if (event.key === 'Escape' && operations.open !== null) {
        event.stopPropagation();
        operations.cancel(operations.open);
      }
    });
  }

  /** Ask for the plan to clean what is stale, as a click on its button does. */
  planCleaning(): void {
    this.#actions.planCleaning();
  }

  /** Look at the kernel, from now on or again. */
  open(): void {
    this.#connection.open();
    this.#unwatch = watchVisibility(this.node, visible => {
      this.#connection.setVisible(visible);
    });
  }

  /** Look no longer, and ask nothing of the kernel, until it is opened again. A plan that is open stays. */
  rest(): void {
    this.#unwatch();
    this.#connection.rest();
  }

  close(): void {
    this.rest();
    this.#connection.close();
    this.node.remove();
  }

  #update(what: Change): void {
    const { tick, silent } = this.#connection;
    const isEmpty = this.#notice.update(this.#connection);
    show(this.#content, !isEmpty);
    show(this.#dock, !isEmpty);
    this.#header.update(isEmpty ? null : tick, silent, this.#connection.notebook);
    if (what === 'heap') {
      this.#drawHeap();
    } else if (what === 'lost') {
      this.#operations.forget();
    }
    if (tick !== null) {
      this.#drawTick(tick, silent);
    }
    const jobs = JSON.stringify(tick?.jobs ?? []);
    if (what !== 'tick' || jobs !== this.#drawnJobs) {
      this.#drawnJobs = jobs;
      this.#drawOperations();
    }
  }

  #drawTick(tick: Tick, silent: boolean): void {
    setAttribute(this.node, 'data-tick', String(tick.n));
    const words = caveat(tick, silent, this.#trans);
    setText(this.#caveat, words);
    show(this.#caveat, words !== '');
    this.#line.follow(tick);
    const warning = silent ? '' : this.#approach.follow(tick);
    setText(this.#warning, warning);
    show(this.#warning, warning !== '');
    this.#operations.reconcile(tick.jobs);
    this.#drawDevices();
    this.#fragmentation.follow(tick);
    this.#history.follow(tick);
    this.#asOf.update(this.#connection.heap, tick);
    this.#neighbours.update(tick);
    this.#fit.update(tick);
    this.#holders.follow(tick);
    this.#findings.follow(tick.fit);
    this.#actions.follow(tick);
    this.#result.follow(tick);
  }

  #drawDevices(): void {
    const { tick } = this.#connection;
    const devices = tick?.devices ?? [];
    const isNamed = devices.length > 1;
    this.#devices.update(devices.map(device => ({ boot: tick?.boot ?? '', device, isNamed })));
  }

  #drawHeap(): void {
    this.#asOf.update(this.#connection.heap, this.#connection.tick);
    for (const section of this.#ofHeap) {
      section.update(this.#connection.heap);
    }
  }

  #drawOperations(): void {
    for (const panel of this.#ofOperations) {
      panel.update();
    }
  }
}
