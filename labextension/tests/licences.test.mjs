/** What is packed of others is named with its licence: a real package is packed by the packer of the real build. */

import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

import * as esbuild from 'esbuild';
import { expect, test } from 'vitest';

import { thirdParties } from '../licences.mjs';

async function packed(source) {
  const entry = join(await mkdtemp(join(tmpdir(), 'licences-')), 'entry.js');
  await writeFile(entry, source);
  const options = { entryPoints: [entry], bundle: true, write: false, metafile: true, logLevel: 'silent' };
  return (await esbuild.build({ ...options, nodePaths: [resolve('node_modules')] })).metafile;
}

test('a package that is packed is named with its version and its licence', async () => {
  const [found, ...more] = await thirdParties([await packed('import axe from "axe-core"; console.log(axe.version)')]);

  expect(more).toEqual([]);
  expect(found).toMatchObject({ name: 'axe-core', licenseId: 'MPL-2.0' });
  expect(found.versionInfo).toMatch(/^\d+\./);
  expect(found.extractedText).toContain('Mozilla Public License');
});

test('sources of our own are nobody else\'s', async () => {
  expect(await thirdParties([await packed('console.log(1)')])).toEqual([]);
});
