// Python, compiled for browsers, with nbguard: answers the questions of the page, one after another. Nothing leaves this machine.
import { loadPyodide } from './pyodide/pyodide.mjs';

const here = name => new URL(name, import.meta.url);
const SOURCES = '/nbguard';
let folders = 0;

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: here('./pyodide/').href }),
    fetch(here('./nbguard.zip')).then(answer => answer.arrayBuffer())
  ]);
  python.unpackArchive(archive, 'zip', { extractDir: SOURCES });
  const make = python.runPython(`
import sys
sys.path.insert(0, ${JSON.stringify(SOURCES)})
from nbguard.frontend.browser import Page
Page`);
  return { python, page: make((stage, done, total) => postMessage({ stage, done, total })) };
}

const started = start();

// Mounts files where Python reads them in place, without a copy of them in memory; returns the folder.
function mount(python, files) {
  const folder = `/files-${++folders}`;
  python.FS.mkdir(folder);
  python.FS.mount(python.FS.filesystems.WORKERFS, { files }, folder);
  return folder;
}

self.onmessage = async ({ data: { id, question, files } }) => {
  try {
    const { python, page } = await started;
    if (files) {
      question.path = `${mount(python, files)}/${question.name}`;
      delete question.name;
    }
    const answer = JSON.parse(page.answer(JSON.stringify(question)));
    postMessage({ id, answer: { ...answer, path: question.path } });
  } catch (error) {
    postMessage({ id, fatal: String(error?.message ?? error) });
  }
};

started.then(() => postMessage({ ready: true }), error => postMessage({ fatal: String(error) }));
