/** Whose code is in what was packed, with the licences, from what esbuild says that it has read. */

import { readdir, readFile } from 'node:fs/promises';

const PACKAGE = /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//;
const LICENCE = /^(licen[cs]e|copying|notice)/i;

/** Return the packages of others that have a file in one of the outputs, in the form that JupyterLab's licence page reads. */
export async function thirdParties(metafiles) {
  const outputs = metafiles.flatMap(({ outputs }) => Object.values(outputs));
  const folders = outputs.flatMap(({ inputs }) => Object.keys(inputs)).map(path => PACKAGE.exec(path)?.[1]);
  const known = [...new Set(folders.filter(folder => folder !== undefined))].sort();
  return Promise.all(known.map(thirdParty));
}

async function thirdParty(folder) {
  const { name, version, license } = JSON.parse(await readFile(`${folder}/package.json`, 'utf8'));
  const files = (await readdir(folder)).filter(file => LICENCE.test(file)).sort();
  const texts = await Promise.all(files.map(file => readFile(`${folder}/${file}`, 'utf8')));
  return { name, versionInfo: version, licenseId: license ?? '', extractedText: texts.join('\n') };
}
