/**
 * Packs what browsers get: the JupyterLab extension into nbguard/labextension, the inline widget into nbguard/frontend/notebook/static.
 *
 *     node labextension/build.mjs [--watch]
 *
 * JupyterLab's own builder adds 13 kB to each page, nearly all of it to choose among versions of shared packages, where a page
 * has one of each (docs/adr/0017-a-container-of-our-own.md).
 */

import { cp, mkdir, readdir, readFile, rm, watch, writeFile } from 'node:fs/promises';
import { basename } from 'node:path';

import * as esbuild from 'esbuild';

import { thirdParties } from './licences.mjs';

const SOURCES = 'labextension/src';
const EXTENSION = 'nbguard/labextension';
const COMMON = { bundle: true, minify: true, target: 'es2022', logLevel: 'warning' };

/**
 * Packages that are taken from the page: src/container.ts has them ready before the plugins are loaded. Each is a module that
 * exports what our sources import of it: as CommonJS modules they would come with a kilobyte to tell one kind from the other.
 */
function sharedPackages(names) {
  let imports = '';
  return {
    name: 'shared packages',
    setup(build) {
      build.onStart(async () => {
        const files = await readdir(SOURCES);
        const texts = files.filter(name => name.endsWith('.ts')).map(name => readFile(`${SOURCES}/${name}`, 'utf8'));
        imports = (await Promise.all(texts)).join('\n');
      });
      build.onResolve({ filter: /^@(jupyterlab|lumino)\// }, ({ path }) => ({ path, namespace: 'page' }));
      build.onLoad({ filter: /.*/, namespace: 'page' }, ({ path }) => {
        names.add(path);
        return { contents: `export const { ${importedFrom(path, imports)} } = _JUPYTERLAB.nbguard.packages['${path}']` };
      });
    }
  };
}

/** The names of values that sources import from a package; a type is left out. */
function importedFrom(path, sources) {
  const lists = [...sources.matchAll(new RegExp(`^import \\{([^}]*)\\} from '${path}';$`, 'gm'))];
  const names = lists.flatMap(([, list]) => list.split(',')).map(name => name.trim());
  return [...new Set(names.filter(name => name !== '' && !name.startsWith('type ')))].sort().join(', ');
}

/** A style sheet that is imported is its minified text. What was read for it is added to `metafiles`. */
function styleSheets(metafiles) {
  return {
    name: 'style sheets',
    setup(build) {
      build.onLoad({ filter: /\.css$/ }, async ({ path }) => {
        const { metafile, outputFiles } = await esbuild.build({ ...COMMON, metafile: true, entryPoints: [path], write: false });
        metafiles.push(metafile);
        return { contents: outputFiles[0].text, loader: 'text', watchFiles: [path] };
      });
    }
  };
}

async function buildExtension() {
  await rm(EXTENSION, { recursive: true, force: true });
  await mkdir(`${EXTENSION}/static`, { recursive: true });
  const names = new Set();
  const sheets = [];
  const { metafile } = await esbuild.build({
    ...COMMON,
    entryPoints: ['labextension/src/index.ts'],
    format: 'esm',
    splitting: true,
    metafile: true,
    outdir: `${EXTENSION}/static`,
    entryNames: '[name]-[hash]',
    chunkNames: '[name]-[hash]',
    plugins: [sharedPackages(names), styleSheets(sheets)]
  });
  const container = await esbuild.build({
    ...COMMON,
    bundle: false, // a plain script
    entryPoints: ['labextension/src/container.ts'],
    metafile: true,
    outdir: `${EXTENSION}/static`,
    entryNames: '[name]-[hash]',
    define: {
      PLUGINS: JSON.stringify(`./${entryOf(metafile)}`),
      IMPORTED: JSON.stringify(importsOf(metafile).join(' ')),
      PACKAGES: JSON.stringify([...names].sort().join(' '))
    }
  });
  await describe(`static/${entryOf(container.metafile)}`);
  return [metafile, container.metafile, ...sheets];
}

/** The file that was made of the entry point. */
function entryOf({ outputs }) {
  return basename(Object.entries(outputs).find(([, { entryPoint }]) => /\/(index|container)\.ts$/.test(entryPoint ?? ''))[0]);
}

/** The files that the entry point's file imports at once. */
function importsOf({ outputs }) {
  const entry = Object.values(outputs).find(({ entryPoint }) => entryPoint?.endsWith('/index.ts'));
  return entry.imports.filter(({ kind }) => kind === 'import-statement').map(({ path }) => basename(path));
}

/** Write what a Jupyter server reads of an extension: the file to load, and the settings. */
async function describe(load) {
  const manifest = JSON.parse(await readFile('package.json', 'utf8'));
  manifest.jupyterlab._build = { load, extension: './extension' };
  await writeFile(`${EXTENSION}/package.json`, JSON.stringify(manifest, null, 2));
  await cp('labextension/schema', `${EXTENSION}/schemas/nbguard`, { recursive: true });
}

async function buildWidget() {
  const { metafile } = await esbuild.build({
    ...COMMON,
    metafile: true,
    entryPoints: ['src/widget.ts', 'style/view.css'].map(file => ({ in: `labextension/${file}`, out: 'widget' })),
    format: 'esm',
    outdir: 'nbguard/frontend/notebook/static'
  });
  return metafile;
}

async function buildAll() {
  const packed = [...(await buildExtension()), await buildWidget()];
  const packages = await thirdParties(packed);
  await writeFile(`${EXTENSION}/static/third-party-licenses.json`, JSON.stringify({ packages }, null, 2));
}

await buildAll();
if (process.argv.includes('--watch')) {
  for await (const { filename } of watch('labextension', { recursive: true })) {
    console.log(`${filename} has changed`);
    await buildAll().catch(() => undefined); // esbuild has said what is wrong
  }
}
