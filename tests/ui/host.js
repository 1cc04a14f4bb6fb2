// A host for the view on an empty page: what anywidget is in a notebook.
window.host = {
  values: { tick: {}, heap: {} },
  acts: {},
  sent: [],

  async show(code) {
    const { default: view } = await import(URL.createObjectURL(new Blob([code], { type: 'text/javascript' })));
    const model = {
      get: name => this.values[name],
      on: (event, act) => (this.acts[event] ??= new Set()).add(act),
      off: (event, act) => this.acts[event]?.delete(act),
      send: message => this.sent.push(message)
    };
    await view.render({ model, el: document.querySelector('main') });
  },

  set(name, value) {
    this.values[name] = value;
    this.acts[`change:${name}`]?.forEach(act => act());
  },

  answer(message) {
    this.acts['msg:custom']?.forEach(act => act(message));
  },

  ticks: 0,

  /** A new tick, and a heap in which everybody holds more; milliseconds until the next frame has been drawn. */
  async feed({ tick, heap }) {
    const holders = heap.holders.map(row => ({ ...row, nbytes: row.nbytes + this.ticks * 1048576 }));
    const start = performance.now();
    this.set('heap', { ...heap, holders, heap: heap.heap + this.ticks });
    this.set('tick', { ...tick, n: tick.n + this.ticks, t: Date.now() / 1000, heap: heap.heap + this.ticks });
    this.ticks += 1;
    await this.painted();
    return performance.now() - start;
  },

  painted: () => new Promise(done => requestAnimationFrame(() => setTimeout(done))),

  /** So many ticks as fast as they are drawn, with numbers that change; a new heap with every fortieth, as after cells. */
  async run(state, ticks) {
    for (let n = 0; n < ticks; n++) {
      const [since, , , , nbytes, ...rest] = state.tick.devices[0].line;
      const now = nbytes + ((n * 7) % 13) * 1048576;
      const line = [since + this.ticks, since + this.ticks, now, now, now, ...rest];
      const tick = { ...state.tick, devices: [{ ...state.tick.devices[0], line }, ...state.tick.devices.slice(1)] };
      if (n % 40 === 0) await this.feed({ ...state, tick });
      else this.set('tick', { ...tick, n: tick.n + this.ticks++, t: line[1], heap: this.values.heap.heap });
      if (n % 10 === 0) await this.painted();
    }
  }
};
