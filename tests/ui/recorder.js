// Runs in a page before everything else: notes when the first kernel is called and its answers arrive, and when the user clicks.
window.recorder = {
  frames: [],
  kernelAt: 0,
  clicked: 0,

  reset() {
    this.frames.length = 0;
    this.clicked = 0;
  },

  /** Milliseconds from the last click to the first answer with this op after it. */
  async after(op, within = 20000) {
    const until = performance.now() + within;
    for (;;) {
      const frame = this.clicked && this.frames.find(found => found.op === op && found.t >= this.clicked);
      if (frame) return frame.t - this.clicked;
      if (performance.now() > until) throw new Error(`no ${op} within ${within} ms`);
      await new Promise(done => setTimeout(done, 10));
    }
  },

  /** Times at which the number of the last tick changed in the view. */
  ticks(selector, ms) {
    return new Promise(done => {
      const times = [];
      const view = document.querySelector(selector);
      const observer = new MutationObserver(() => times.push(performance.now()));
      observer.observe(view, { attributes: true, attributeFilter: ['data-tick'] });
      setTimeout(() => (observer.disconnect(), done(times)), ms);
    });
  }
};

addEventListener('click', event => (recorder.clicked = event.timeStamp), true);

window.WebSocket = class extends WebSocket {
  constructor(...args) {
    super(...args);
    recorder.kernelAt ||= String(args[0]).includes('/channels') ? performance.now() : 0;
    this.addEventListener('message', ({ data }) => {
      const text = typeof data === 'string' ? data : new TextDecoder().decode(data);
      const op = /"comm_id": ?"nbguard"/.test(text) && /"op": ?"(\w+)"/.exec(text);
      const sent = op && /"n": ?\d+, ?"t": ?([\d.]+)/.exec(text); // a tick's: seconds by the kernel's clock
      const bytes = data.byteLength ?? data.length;
      if (op) recorder.frames.push({ op: op[1], t: performance.now(), sent: sent && Number(sent[1]), bytes });
    });
  }
};
