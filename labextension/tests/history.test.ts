// @vitest-environment jsdom

import { afterEach, beforeEach, describe, expect, it } from 'vitest';

import type { MomentView } from '../src/view/protocol';
import { FakeModel, scene } from './model';
import { control, open } from './page';

let model: FakeModel;
let root: HTMLElement;
let close: () => void;

const moment: MomentView = {
  device: 0,
  devices: [0],
  event: 5,
  events: 9,
  peak: 5,
  refused: null,
  sentences: ['The event: a request of 4 MiB, in `train.py:3`.', 'The peak was here, 20 MiB, made of 20 MiB net.'],
  course: [0, 4 << 20, 20 << 20, 4 << 20],
  segments: 1,
  strips: [{ segments: 1, nbytes: 20 << 20, pieces: [['allocated', 20 << 20]] }],
  holders: [['net', 20 << 20]]
};

beforeEach(() => {
  model = new FakeModel(scene('training'));
  ({ root, close } = open(model));
});

afterEach(() => {
  close();
});

function slider(): HTMLInputElement {
  return control(root, 'Event of the history') as HTMLInputElement;
}

function move(event: number): void {
  slider().value = String(event);
  slider().dispatchEvent(new Event('input'));
}

describe('the history', () => {
  it('is asked for when it is opened, and begins at the peak', () => {
    expect(model.all('moment')).toEqual([]);
    control(root, 'show the history').click();
    expect(model.last('moment')).toMatchObject({ op: 'moment' });
    expect(model.last('moment')).not.toHaveProperty('event');
    model.say('moment', { op: 'moment', moment });
    expect(slider().getAttribute('aria-valuetext')).toBe('event 5 of 9');
    expect([slider().value, slider().max]).toEqual(['5', '9']);
    expect(root.textContent).toContain('The peak was here, 20 MiB');
    expect(control(root, 'Peak')).toBeTruthy();
    expect(() => control(root, 'First refusal')).toThrow();
  });

  it('asks for one event at a time, the last that was chosen', () => {
    control(root, 'show the history').click();
    model.say('moment', { op: 'moment', moment });
    [4, 3, 2].forEach(move);
    expect(model.all('moment')).toHaveLength(2);
    expect(model.last('moment')).toMatchObject({ device: 0, event: 4 });
    model.say('moment', { op: 'moment', moment: { ...moment, event: 4 } });
    expect(slider().value).toBe('2');
    expect(model.last('moment')).toMatchObject({ event: 2 });
    model.say('moment', { op: 'moment', moment: { ...moment, event: 2, holders: [] } });
    expect(slider().getAttribute('aria-valuetext')).toBe('event 2 of 9');
    control(root, 'Peak').click();
    expect(model.last('moment')).toMatchObject({ event: 5 });
  });

  it('says why there is none, and asks again when it is opened again', () => {
    control(root, 'show the history').click();
    model.say('moment', { op: 'refused', why: 'nothing is recorded; `%gpumem record on` records' });
    expect(root.textContent).toContain('nothing is recorded');
    control(root, 'hide the history').click();
    expect(root.textContent).not.toContain('nothing is recorded');
    control(root, 'show the history').click();
    expect(model.all('moment')).toHaveLength(2);
  });

  it('lets one of several devices be chosen', () => {
    control(root, 'show the history').click();
    model.say('moment', { op: 'moment', moment: { ...moment, devices: [0, 2] } });
    control(root, 'cuda:2').click();
    expect(model.last('moment')).toMatchObject({ device: 2 });
    model.say('moment', { op: 'moment', moment: { ...moment, device: 2, devices: [0, 2] } });
    expect(control(root, 'cuda:2').getAttribute('aria-pressed')).toBe('true');
  });
});
