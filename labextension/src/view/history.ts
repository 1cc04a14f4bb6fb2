/** The allocator's recorded history: a slider over its events, and below it the device after the one that it stands at. */

import { formatColumn } from './bytes';
import type { Progress } from './connection';
import { button, element, type ItemView, KeyedList, nameElement, sentenceElement, setAttribute, setName, setText, show } from './dom';
import { Strips } from './fragmentation';
import type { MemoryState, MomentView, Tick } from './protocol';
import type { ViewContext } from './view_context';
import { sentence } from './words';

const HEIGHT = 24;

interface HeldRow {
  label: string;
  figure: string;
}

export class HistorySection {
  readonly node = element('section', 'section');
  readonly #toggle: HTMLButtonElement;
  readonly #note = element('div', 'dim wrap');
  readonly #body = element('div');
  readonly #course = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  readonly #slider = element('input', 'range');
  readonly #place = element('output', 'dim');
  readonly #peak: HTMLButtonElement;
  readonly #refused: HTMLButtonElement;
  readonly #others = element('div', 'buttons');
  readonly #sentences = element('div');
  readonly #strips: Strips;
  readonly #holders: KeyedList<HeldRow>;
  #moment: MomentView | null = null;
  /** Request that is not answered yet, and the event that is to be asked for after it. */
  #asked = '';
  #next: number | null = null;
  #isOpen = false;
  #hasHeap = false;

  readonly #context: ViewContext;

  constructor(context: ViewContext) {
    this.#context = context;
    const { trans } = context;
    this.#toggle = button('link', '', () => {
      this.#open(!this.#isOpen);
    });
    this.#peak = button('', trans.__('Peak'), () => {
      this.#go(this.#moment?.peak ?? 0);
    });
    this.#refused = button('', trans.__('First refusal'), () => {
      this.#go(this.#moment?.refused ?? 0);
    });
    this.#slider.type = 'range';
    this.#slider.min = '0';
    this.#slider.setAttribute('aria-label', trans.__('Event of the history'));
    this.#slider.addEventListener('input', () => {
      this.#go(Number(this.#slider.value));
    });
    this.#strips = new Strips(trans);
    const held = element('ul', 'key');
    this.#holders = new KeyedList(held, row => row.label, holderView);
    const steps = element('div', 'buttons', this.#place, this.#peak, this.#refused);
    this.#body.append(this.#picture(), this.#slider, steps, this.#others, this.#sentences, this.#strips.node, held);
    const title = element('div', 'title-line', element('h3', 'title', trans.__('History')), this.#toggle);
    this.node.append(title, this.#note, this.#body);
    this.#open(false);
    show(this.node, false);
  }

  update(heap: MemoryState | null): void {
    this.#hasHeap = heap !== null;
  }

  /** Where there is no device there is no allocator whose history could be kept. */
  follow(tick: Tick): void {
    show(this.node, this.#hasHeap && tick.devices.some(({ device }) => device !== 'cpu'));
  }

  #picture(): SVGElement {
    const picture = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    picture.setAttribute('class', 'nbguard-course');
    picture.setAttribute('preserveAspectRatio', 'none');
    picture.setAttribute('aria-hidden', 'true'); // the slider and the sentences say it
    picture.append(this.#course);
    return picture;
  }

  #open(isOpen: boolean): void {
    this.#isOpen = isOpen;
    const { trans } = this.#context;
    setAttribute(this.#toggle, 'aria-expanded', String(isOpen));
    setText(this.#toggle, isOpen ? trans.__('hide') : trans.__('show'));
    setAttribute(this.#toggle, 'aria-label', isOpen ? trans.__('hide the history') : trans.__('show the history'));
    this.#tell('');
    show(this.#body, isOpen && this.#moment !== null);
    if (isOpen) {
      this.#ask(this.#moment?.device ?? null, null);
    }
  }

  #go(event: number): void {
    this.#slider.value = String(event);
    this.#say(event);
    if (this.#asked === '') {
      this.#ask(this.#moment?.device ?? null, event);
    } else {
      this.#next = event;
    }
  }

  #ask(device: number | null, event: number | null): void {
    this.#next = null;
    const of = { ...(device === null ? {} : { device }), ...(event === null ? {} : { event }) };
    const rid = this.#context.connection.ask({ op: 'moment', ...of }, progress => {
      if (this.#asked === rid) {
        this.#hear(progress);
      }
    });
    this.#asked = rid;
  }

  #hear(progress: Progress): void {
    const { trans } = this.#context;
    switch (progress.op) {
      case 'late':
        this.#tell(trans.__('runs when the cell ends'));
        return;
      case 'queued':
        this.#tell(progress.why);
        return;
      case 'refused':
        this.#tell(progress.why);
        break;
      case 'lost':
        this.#tell(trans.__('The kernel was restarted.'));
        this.#moment = null;
        this.#next = null;
        show(this.#body, false);
        break;
      case 'moment':
        this.#tell('');
        this.#draw(progress.moment);
        break;
      default:
        return;
    }
    this.#asked = '';
    if (this.#next !== null) {
      this.#ask(this.#moment?.device ?? null, this.#next);
    }
  }

  #tell(words: string): void {
    this.#note.replaceChildren(...(words === '' ? [] : [sentenceElement('div', words)]));
  }

  #draw(moment: MomentView): void {
    const isOther = moment.devices.join() !== this.#moment?.devices.join();
    this.#moment = moment;
    show(this.#body, this.#isOpen);
    this.#slider.max = String(moment.events);
    if (this.#next === null) {
      this.#slider.value = String(moment.event);
      this.#say(moment.event);
    }
    show(this.#refused, moment.refused !== null);
    if (isOther) {
      const others = moment.devices.map(device =>
        button('', `cuda:${device}`, () => {
          this.#ask(device, null);
        })
      );
      this.#others.replaceChildren(...(others.length > 1 ? others : []));
    }
    this.#others.querySelectorAll('button').forEach((each, at) => {
      setAttribute(each, 'aria-pressed', String(moment.devices[at] === moment.device));
    });
    this.#sentences.replaceChildren(...moment.sentences.map(each => sentenceElement('div', sentence(each))));
    this.#strips.update(moment);
    const figures = formatColumn(moment.holders.map(([, nbytes]) => nbytes));
    this.#holders.update(moment.holders.map(([label], at) => ({ label, figure: figures[at] ?? '' })));
    const most = Math.max(1, ...moment.course);
    const svg = this.#course.ownerSVGElement;
    svg?.setAttribute('viewBox', `0 0 ${Math.max(1, moment.course.length)} ${HEIGHT}`);
    const steps = moment.course.map((nbytes, at) => `V${(HEIGHT * (1 - nbytes / most)).toFixed(2)}H${at + 1}`);
    this.#course.setAttribute('d', `M0 ${HEIGHT}${steps.join('')}V${HEIGHT}Z`);
  }

  #say(event: number): void {
    const events = this.#moment?.events ?? 0;
    const words = this.#context.trans.__('event %1 of %2', event.toLocaleString('en'), events.toLocaleString('en'));
    setText(this.#place, words);
    setAttribute(this.#slider, 'aria-valuetext', words);
  }
}

function holderView(): ItemView<HeldRow> {
  const name = nameElement('span', 'key-words');
  const figure = element('span', 'figure');
  return {
    node: element('li', '', name, figure),
    update: row => {
      setName(name, row.label);
      setText(figure, row.figure);
    }
  };
}
