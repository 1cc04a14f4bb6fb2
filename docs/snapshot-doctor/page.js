// The page: chosen files go to the worker, its answers come back as HTML that nbguard has escaped, and as text.
const by = id => document.getElementById(id);
const SIDECAR = '.nbguard.json';
const beyond = name => `${name} needs more than a browser’s tab can give it; in a terminal, nbguard diagnose FILE reads it.`;
const NO_START = 'Python could not be started. The page needs a web server and a browser of the last two years.';

const files = new Map(); // number → { name, chosen, path, devices }; path: '' while the worker's Python has not opened it
let current = 0; // number of the file that is shown
let numbered = 0;
let worker;
let isUsed = false; // whether the worker's Python has been asked anything
let waiting; // of each question by its number, what ends it
let asked = 0;
let heard = 0; // when the worker last said something
let patience = 0; // milliseconds that it may be silent

function begin() {
  worker?.terminate();
  for (const end of waiting?.values() ?? []) end({ error: beyond('This file'), beyond: true });
  waiting = new Map();
  isUsed = false;
  for (const file of files.values()) file.path = '';
  by('time').hidden = true;
  const mine = new Worker(new URL('./worker.js', import.meta.url), { type: 'module' });
  mine.onmessage = ({ data }) => {
    if (mine !== worker) return;
    heard = performance.now();
    if (data.stage) progress(data);
    else if ('answer' in data) settle(data.id, data.answer);
    else if (data.fatal) fail(data.id === undefined ? NO_START : beyond('This file'));
    else if (data.ready) document.body.dataset.ready = 'true';
  };
  mine.onerror = event => {
    event.preventDefault();
    fail(NO_START);
  };
  worker = mine;
}

// After an answer that broke the worker's Python there is a new one. It opens the other files again when they are asked for.
function fail(sentence) {
  by('status').textContent = '';
  by('error').textContent = sentence;
  if (sentence !== NO_START) begin();
}

function settle(id, answer) {
  waiting.get(id)?.(answer);
  waiting.delete(id);
}

function ask(question, chosen) {
  const id = ++asked;
  isUsed = true;
  heard = performance.now();
  return new Promise(end => {
    waiting.set(id, end);
    worker.postMessage({ id, question, files: chosen });
  });
}

let told = 0;
function progress({ stage, done, total }) {
  if (performance.now() - told < 500) return;
  told = performance.now();
  by('status').textContent =
    stage === 'read' ? `Reading: ${Math.round((100 * done) / total)} %` : `Trying other settings: run ${done} of ${total}`;
}

// Shows an answer in a section, or its error above all; returns whether it is one.
function show(section, answer) {
  by('error').textContent = answer.error ?? '';
  if (answer.error) return false;
  const place = by(section);
  place.querySelector('.shown').innerHTML = answer.html;
  place.querySelector('pre').textContent = answer.text;
  place.hidden = false;
  return true;
}

async function open(chosen) {
  const file = chosen.find(each => !each.name.endsWith(SIDECAR));
  if (!file) return;
  delete document.body.dataset.done;
  const number = ++numbered;
  for (const name of ['answer', 'time']) by(name).hidden = true;
  by('error').textContent = '';
  by('status').textContent = document.body.dataset.ready ? `Reading ${file.name}` : 'Starting Python';
  const wasUsed = isUsed;
  const entry = { name: file.name, chosen, path: '', devices: [] };
  let answer = await read(number, entry);
  if (answer.beyond && wasUsed) { // what earlier files left may have broken this Python or filled its memory: once more, in a new one
    if (isUsed) begin();
    answer = await read(number, entry);
  }
  if (answer.beyond) drop(number);
  by('error').textContent = answer.beyond ? beyond(file.name) : (answer.error ?? '');
  by('status').textContent = by('error').textContent ? '' : `${file.name}: done`;
  document.body.dataset.done = 'true';
}

// Has the worker open a file; returns its answer.
async function load(file) {
  patience = 120_000 + file.chosen.reduce((bytes, each) => bytes + each.size, 0) / 500;
  const answer = await ask({ ask: 'open', name: file.name }, file.chosen);
  if (!answer.error) file.path = answer.path;
  return answer;
}

// Shows all answers on a file; returns the last.
async function read(number, file) {
  const first = await load(file);
  if (!show('answer', first)) return first;
  current = number;
  files.set(number, file);
  listFiles();
  const { path } = file;
  const history = await ask({ ask: 'history', path });
  if (history.beyond) return history;
  openHistory(history.devices ?? []);
  by('status').textContent = 'Trying other settings of the allocator';
  const last = await ask({ ask: 'diagnose', path });
  show('answer', last);
  return last;
}

// --- time

function openHistory(devices) {
  files.get(current).devices = devices;
  by('time').hidden = !devices.length;
  if (!devices.length) return;
  by('device').replaceChildren(...devices.map(({ device }) => new Option(`cuda:${device}`, device)));
  by('device-label').hidden = devices.length < 2;
  chooseDevice();
}

const device = () => files.get(current).devices[by('device').selectedIndex];

function chooseDevice() {
  const { events, peak, oom } = device();
  by('slider').max = by('event').max = events;
  by('oom').hidden = oom === null;
  goTo(oom ?? peak);
}

let isMoving = false;
let wanted = null;

// Goes to an event; of those that come while an answer is on its way, only the last is asked for.
async function goTo(event) {
  const { events } = device();
  wanted = Math.min(Math.max(Math.trunc(event) || 0, 0), events);
  by('slider').value = by('event').value = wanted;
  by('slider').setAttribute('aria-valuetext', `event ${wanted} of ${events}`);
  if (isMoving) return;
  isMoving = true;
  while (wanted !== null) {
    const at = wanted;
    wanted = null;
    show('time', await ask({ ask: 'moment', path: files.get(current).path, at, device: device().device }));
    by('time').dataset.event = at;
  }
  isMoving = false;
}

// --- comparing

function listFiles() {
  for (const id of ['before', 'after']) {
    const chosen = Number(by(id).value);
    by(id).replaceChildren(...[...files].map(([number, { name }]) => new Option(name, number)));
    by(id).value = files.has(chosen) ? chosen : current;
  }
  if (files.has(current)) by('after').value = current;
  by('compare').hidden = !files.size;
}

function drop(number) {
  files.delete(number);
  listFiles();
}

// Says whether a file is open, after opening it again if the Python that had it has ended.
async function isOpen(number) {
  const file = files.get(number);
  if (file.path) return true;
  by('status').textContent = `Reading ${file.name}`;
  const answer = await load(file);
  by('status').textContent = '';
  if (!answer.error) return true;
  drop(number);
  by('error').textContent = answer.beyond ? beyond(file.name) : answer.error;
  return false;
}

const moment = text => (text === '' ? null : /^\d+$/.test(text) ? Number(text) : text);

async function compare() {
  const at = ['before-event', 'after-event'].map(id => moment(by(id).value.trim()));
  const numbers = ['before', 'after'].map(id => Number(by(id).value));
  if (at.some(each => typeof each === 'string' && !['peak', 'oom'].includes(each))) {
    by('error').textContent = 'An event is a number, peak or oom.';
    return;
  }
  for (const number of numbers) if (!(await isOpen(number))) return;
  const [before, after] = numbers.map(number => files.get(number).path);
  show('compare', await ask({ ask: 'diff', before, after, at }));
}

// --- events of the page

const dark = matchMedia('(prefers-color-scheme: dark)');
const setTheme = () => { document.body.dataset.jpThemeLight = String(!dark.matches); }; // the colours of the pictures
dark.addEventListener('change', setTheme);
setTheme();
by('files').addEventListener('change', () => open([...by('files').files]));
document.addEventListener('dragover', event => {
  event.preventDefault();
  document.body.classList.add('over');
});
document.addEventListener('dragleave', () => document.body.classList.remove('over'));
document.addEventListener('drop', event => {
  event.preventDefault();
  document.body.classList.remove('over');
  open([...event.dataTransfer.files]);
});
by('slider').addEventListener('input', () => goTo(by('slider').valueAsNumber));
by('event').addEventListener('change', () => goTo(by('event').valueAsNumber));
by('peak').addEventListener('click', () => goTo(device().peak));
by('oom').addEventListener('click', () => goTo(device().oom));
by('device').addEventListener('change', chooseDevice);
by('compare-now').addEventListener('click', compare);
setInterval(() => {
  if (waiting.size && performance.now() - heard > patience) fail(beyond('This file'));
}, 5000);
begin();
