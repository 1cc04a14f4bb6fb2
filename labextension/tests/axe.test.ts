// @vitest-environment jsdom

import axe from 'axe-core';
import { afterEach, describe, expect, it, vi } from 'vitest';

import { FakeModel, outcome, plan, scene, why, type Scene } from './model';
import { control, open } from './page';

vi.setConfig({ testTimeout: 60_000 });

let close: () => void;

afterEach(() => {
  close();
});

/** What axe finds wrong; it cannot see colours here, and a section is no page. */
async function violations(root: HTMLElement): Promise<string[]> {
  const off = { enabled: false };
  const found = await axe.run(root, { rules: { 'color-contrast': off, region: off, 'page-has-heading-one': off } });
  return found.violations.map(each => `${each.id}: ${each.nodes.map(node => node.html).join(' ')}`);
}

function show(name: Scene): { model: FakeModel; root: HTMLElement } {
  const model = new FakeModel(scene(name));
  const opened = open(model);
  ({ close } = opened);
  return { model, root: opened.root };
}

describe('axe finds nothing wrong', () => {
  it.each<Scene>(['training', 'oom', 'parked'])('in %s', async name => {
    expect(await violations(show(name).root)).toEqual([]);
  });

  it('in a plan, with why and the menu open', async () => {
    const { model, root } = show('stale');
    control(root, 'why losses').click();
    model.say('why', { op: 'why', why });
    control(root, 'More actions').click();
    expect(await violations(root)).toEqual([]);
    control(root, 'Clean stale').click();
    model.say('plan', { op: 'plan', plan: { ...plan, irreversible: 'this cannot be undone' } });
    expect(await violations(root)).toEqual([]);
  });

  it('in what waits and what was done', async () => {
    const { model, root } = show('training');
    control(root, 'Clean stale').click();
    model.say('plan', { op: 'plan', plan });
    control(root, plan.confirm).click();
    model.say('apply', { op: 'queued', why: 'In[15] runs' });
    expect(await violations(root)).toEqual([]);
    model.say('apply', { op: 'done', outcome });
    expect(await violations(root)).toEqual([]);
  });

  it('where there is nothing to show', async () => {
    const model = new FakeModel({ tick: {}, heap: {}, host: { kind: 'not_loaded', notebook: 'a.ipynb' } });
    const opened = open(model, { load: () => undefined });
    ({ close } = opened);
    expect(await violations(opened.root)).toEqual([]);
  });
});
