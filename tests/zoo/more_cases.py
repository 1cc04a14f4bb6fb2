"""More states of the same kinds, each smaller: a for names and containers, b for output, c for errors, x for mixtures."""

from __future__ import annotations

from tests.zoo.cases import FAILED, TRAINED, Case

_FREED = {"model": "freed"}
_REPORTED = {"model": "reported"}
_MAKE = "learn = learner(cbs=Fail()); track('model', learn.model)"

MORE_CASES = (
    Case(
        "a: deque element",
        (
            "from collections import deque\nruns = deque([learner(), learner()]); track('model', runs[0].model); track('k', runs[1].model)",
        ),
        {"model": "freed", "k": "kept"},
        "runs[0]",
        check="runs[0].fit(1)",
    ),
    Case(
        "a: nested float keys",
        (
            "sweep = {'lr': {k: learner() for k in (1e-3, 1e-2)}}; track('model', sweep['lr'][1e-3].model); track('k', sweep['lr'][1e-2].model)",
        ),
        {"model": "freed", "k": "kept"},
        "sweep['lr'][1e-3]",
        check="sweep['lr'][1e-2].fit(1)",
    ),
    Case(
        "a: slots dataclass",
        (
            "from dataclasses import dataclass\n@dataclass(slots=True)\nclass E:\n    learn: object\ne = E(learner()); track('model', e.learn.model)",
        ),
        _FREED,
        "e.learn",
    ),
    Case(
        "a: SimpleNamespace",
        ("from types import SimpleNamespace\nns = SimpleNamespace(learn=learner(), lr=1); track('model', ns.learn.model)",),
        _FREED,
        "ns.learn",
        check="ns.lr",
    ),
    Case(
        "a: property with deleter",
        (
            "class E:\n    def __init__(s): s._l = learner()\n    @property\n    def learn(s): return s._l\n    @learn.deleter\n    def learn(s): del s._l\ne = E(); track('model', e._l.model)",
        ),
        _FREED,
        "e.learn",
        measured=True,
    ),
    Case("a: L of learners", ("runs = L(learner(), learner()); track('model', runs[0].model)",), _FREED, "runs"),
    Case(
        "a: slice",
        ("runs = [learner() for _ in range(3)]; track('model', runs[0].model); track('k', runs[2].model)\ndel _",),
        {"model": "freed", "k": "kept"},
        "runs[:2]",
        check="runs[0].fit(1)",
        measured=True,
    ),
    Case(
        "a: computed key",
        ("runs = [learner() for i in range(3)]; track('model', runs[2].model); track('k', runs[0].model)",),
        {"model": "freed", "k": "kept"},
        "runs[len(runs)-1]",
        check="runs[0].fit(1)",
        measured=True,
    ),
    Case(
        "a: loop vars and dict",
        ("runs = {k: learner() for k in 'ab'}\nfor name, l in runs.items(): l.fit(1)\ntrack('model', runs['b'].model)",),
        _FREED,
        "runs l name",
    ),
    Case(
        "a: df of learners",
        ("df = pd.DataFrame({'lr': [1, 2], 'learn': [learner(), learner()]}); track('model', df.learn[0].model)",),
        _FREED,
        "df",
    ),
    Case(
        "a: df column target",
        ("df = pd.DataFrame({'lr': [1, 2], 'learn': [learner(), learner()]}); track('model', df.learn[0].model)",),
        {"model": "freed"},
        "df['learn']",
        check="df.lr.sum()",
    ),
    Case("a: in list too", (TRAINED, "learns = [learn]"), _REPORTED, "learn", holder=r"\blearns\b", check="learns[0].fit(1)"),
    Case(
        "a: genexpr",
        (TRAINED, "preds = (l.validate() for l in [learn])\ndel learn"),
        _REPORTED,
        holder=r"\bpreds\b",
        check="list(preds)",
    ),
    Case(
        "a: cycle iterator",
        (TRAINED, "import itertools\nit = itertools.cycle([learn]); next(it)\ndel learn"),
        _REPORTED,
        holder=r"\bit\b",
        check="next(it).fit(1)",
    ),
    Case(
        "a: map object",
        (TRAINED, "mp = map(lambda x, l=learn: l.fit(x), [1])\ndel learn"),
        _REPORTED,
        holder=r"\bmp\b",
        check="list(mp)",
    ),
    Case(
        "a: ExitStack",
        (TRAINED, "from contextlib import ExitStack\nes = ExitStack(); _ = es.callback(learn.fit, 1)\ndel learn, _"),
        _REPORTED,
        holder=r"\bes\b",
        check="es.close()",
    ),
    Case(
        "a: weak names",
        (TRAINED, "w = weakref.ref(learn); wp = weakref.proxy(learn); wv = weakref.WeakValueDictionary(l=learn)"),
        _FREED,
        "learn",
    ),
    Case(
        "a: ChainMap, MappingProxy",
        (
            TRAINED,
            "from collections import ChainMap; import types\ncm = ChainMap({}, types.MappingProxyType({'l': learn}))\ndel learn",
        ),
        _REPORTED,
        holder=r"\bcm\b",
        check="cm['l'].fit(1)",
    ),
    Case(
        "a: namedtuple",
        (TRAINED, "from collections import namedtuple\nRun = namedtuple('Run', 'learn lr'); run = Run(learn, 1)\ndel learn"),
        _REPORTED,
        holder=r"\brun\b",
        check="run.learn.fit(1)",
    ),
    Case(
        "a: dls kept, learn replaced",
        (
            "dls = data(); learn = learner(dls); learn.fit(1); track('model', learn.model); track('dls', dls)",
            "learn = learner(dls); learn.fit(1)",
        ),
        {"model": "freed", "dls": "kept"},
        check="learn.fit(1)",
    ),
    Case(
        "a: method of user's class",
        (
            "class T:\n    def __init__(s): s.learn = learner()\n    def go(s): s.learn.fit(1)\nt = T(); track('model', t.learn.model); go = t.go\ndel t",
        ),
        _REPORTED,
        holder=r"\bgo\b",
        check="go()",
    ),
    Case(
        "a: dict as key",
        (TRAINED, "scores = {learn: .5}\ndel learn"),
        _REPORTED,
        holder=r"\bscores\b",
        check="[l.fit(1) for l in scores]",
    ),
    Case("a: set", (TRAINED, "seen = {learn}\ndel learn"), _REPORTED, holder=r"\bseen\b", check="[l.fit(1) for l in seen]"),
    Case("b: never named", ("[learner() for i in range(2)]", "track('model', Out[2][0].model); 1"), _FREED),
    Case("b: tuple of model and opt", (TRAINED, "(learn.model, learn.opt)", "del learn"), _FREED),
    Case("b: named again from Out", (TRAINED, "learn", "x = Out[3]; del learn"), {"model": "kept"}, check="x.fit(1)"),
    Case("b: x = _", (TRAINED, "learn", "x = _; del learn"), {"model": "kept"}, check="x.fit(1)"),
    Case("b: user's _", (TRAINED, "_ = 5", "learn", "1", "2", "del learn"), _FREED, check="assert _ == 5"),
    Case("b: semicolon", (TRAINED, "learn;", "del learn"), _FREED),
    Case(
        "b: exception displayed",
        (_MAKE + "\ntry: learn.fit(1)\nexcept Exception as e: err = e", "err", "del err, learn"),
        _FREED,
    ),
    Case(
        "b: generator displayed",
        (TRAINED, "def gen(l):\n    yield 1\n    l.validate()\ng = gen(learn); next(g)", "g", "del g, learn"),
        _FREED,
    ),
    Case("b: keep option", (TRAINED, "learn", "del learn"), {"model": "kept"}, "--keep Out[3]", check="Out[3].fit(1)"),
    Case(
        "b: ipython_display",
        ("class N(Net):\n    def _ipython_display_(s): print('hi')\nn = N(); track('model', n)", "n", "del n"),
        _FREED,
    ),
    Case(
        "b: dict of learners",
        ("runs = {k: learner() for k in 'ab'}; track('model', runs['a'].model)", "runs", "del runs"),
        _FREED,
    ),
    Case(
        "b: dict, one named",
        (
            "runs = {k: learner() for k in 'ab'}; track('model', runs['a'].model); best = runs['b']; track('k', best.model)",
            "runs",
            "del runs",
        ),
        {"model": "freed", "k": "kept"},
        check="best.fit(1)",
    ),
    Case("b: three underscores", (TRAINED, "learn", "learn.model", "learn.opt", "del learn"), _FREED),
    Case("b: dl displayed", ("dls = data(); track('model', dls.train)", "dls.train", "del dls"), _FREED),
    Case(
        "b: df displayed",
        ("df = pd.DataFrame({'learn': [learner()]}); track('model', df.learn[0].model)", "df", "del df"),
        _REPORTED,
        holder=r"Out\[3\]",
        check="Out[3].learn[0].fit(1)",
    ),
    Case("b: %%time last expr", (TRAINED, "%%time\nlearn", "del learn"), _FREED),
    Case("b: %%capture", (TRAINED, "%%capture cap\nlearn", "del learn"), _FREED, check="cap.show()"),
    Case("b: target Out", (TRAINED, "learn", "del learn"), _FREED, "Out[3]"),
    Case("b: target _", (TRAINED, "learn", "del learn"), _FREED, "_3"),
    Case("b: output then error", (TRAINED, "learn", "1/0", "del learn"), _FREED, errors=(3,)),
    Case(
        "b: matplotlib ax and learn",
        (TRAINED, "import matplotlib; matplotlib.use('agg')\nlearn.recorder.plot_loss()", "del learn"),
        _FREED,
    ),
    Case(
        "c: from None",
        (_MAKE + "\ntry: learn.fit(1)\nexcept Exception: raise KeyError('x') from None", "del learn"),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: custom attribute on error",
        (
            "class TE(Exception):\n    def __init__(s, learn): super().__init__('bad'); s.learn = learn\nlearn = learner(); track('model', learn.model)\nraise TE(learn)",
            "del learn",
        ),
        {"model": "freed"},
        errors=(1,),
    ),
    Case(
        "c: contextmanager",
        (
            "import contextlib\n@contextlib.contextmanager\ndef using(l):\n    x = l.model\n    yield x\n    print(x)\n"
            + _MAKE
            + "\nwith using(learn): learn.fit(1)",
            "del learn",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: task awaited",
        ("import asyncio\nasync def go(l): l.fit(1)\n" + _MAKE + "\nawait asyncio.ensure_future(go(learn))", "del learn"),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: gather",
        (
            "import asyncio\nasync def go(l): l.fit(1)\nasync def slow(): await asyncio.sleep(.01)\n"
            + _MAKE
            + "\nawait asyncio.gather(go(learn), slow())",
            "del learn",
            "await asyncio.sleep(.1)",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: sys.exit in function",
        ("import sys\ndef go():\n    big = torch.ones(900); track('model', big)\n    sys.exit('x')\ngo()",),
        _FREED,
        errors=(1,),
    ),
    Case("c: %%time cell", (_MAKE, "%%time\nlearn.fit(1)", "del learn"), _FREED, errors=(2,)),
    Case("c: %%capture cell", (_MAKE, "%%capture\nlearn.fit(1)", "del learn"), _FREED, errors=(2,)),
    Case("c: %prun", (_MAKE, "%prun -q learn.fit(1)", "del learn"), _FREED, errors=(2,)),
    Case("c: %timeit", (_MAKE, "%timeit -n1 -r1 learn.fit(1)", "del learn"), _FREED, errors=(2,)),
    Case(
        "c: exec frame",
        (
            "src = \"big = torch.ones(900); track('model', big)\\nraise ValueError\"\nexec(src, {'torch': torch, 'track': track})",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: exec frame, locals",
        ("src = \"big = torch.ones(900); track('model', big)\\nraise ValueError\"\nexec(src, globals(), {})",),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: genexpr",
        ("def bad(b): raise ValueError\n" + TRAINED + "\nsum(bad(b) for b in iter(learn.dls.train))", "del learn"),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: listcomp in function",
        (
            "def bad(l, b): raise ValueError\ndef go(l): return [bad(l, b) for b in [l.model]]\n" + TRAINED + "\ngo(learn)",
            "del learn",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: nested function learner, cell",
        (
            "def train():\n    learn = learner(cbs=Fail()); track('model', learn.model); track('learner', learn)\n    def inner(): learn.fit(1)\n    inner()\ntrain()",
        ),
        {"model": "freed", "learner": "freed"},
        errors=(1,),
    ),
    Case(
        "c: decorator args kwargs",
        (
            "import functools\ndef deco(f):\n    @functools.wraps(f)\n    def w(*a, **k): return f(*a, **k)\n    return w\n@deco\ndef go(l, opt=None): l.fit(1)\n"
            + _MAKE
            + "\ngo(learn, opt=learn)",
            "del learn",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: half-built self",
        (
            "class M(nn.Module):\n    def __init__(s):\n        super().__init__(); s.a = nn.Linear(9, 9); track('model', s.a); raise ValueError\nm = M()",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: recursion",
        (
            "%xmode Minimal",  # IPython itself takes 20 s to write the lines of a thousand frames
            "def deep(n, t):\n    t = t + 1\n    if n == 50: track('model', t)\n    return deep(n + 1, t)\ndeep(0, torch.ones(50))",
        ),
        _FREED,
        errors=(2,),
    ),
    Case(
        "c: kept object's method failed",
        (
            "class T:\n    def __init__(s): s.learn = learner(cbs=Fail()); track('k', s.learn.model)\n    def go(s):\n        big = torch.ones(900); track('model', big)\n        s.learn.fit(1)\nt = T(); t.go()",
        ),
        {"model": "freed", "k": "kept"},
        errors=(1,),
        check="t.learn.remove_cb(Fail); t.learn.fit(1)",
    ),
    Case(
        "c: local list, one needed",
        (
            "best = learner(); track('k', best.model)\ndef sweep():\n    runs = [best, learner(cbs=Fail())]; track('model', runs[1].model)\n    for r in runs: r.fit(1)\nsweep()",
        ),
        {"model": "freed", "k": "kept"},
        errors=(1,),
        check="best.fit(1)",
    ),
    Case(
        "c: local container the user holds",
        (
            "cache = {}\ndef go(c):\n    c['t'] = torch.ones(800); track('t', c['t']); big = torch.ones(900); track('model', big)\n    raise ValueError\ngo(cache)",
        ),
        {"model": "freed", "t": "kept"},
        errors=(1,),
        check="assert cache['t'].sum() == 800",
    ),
    Case(
        "c: user keeps sys.last_value",
        (FAILED, "import sys\nerr = sys.last_value; del learn"),
        _REPORTED,
        holder=r"\berr\b",
        errors=(1,),
        check="tb = err.__traceback__\nwhile tb.tb_next: tb = tb.tb_next\nassert 'self' in tb.tb_frame.f_locals and type(tb.tb_frame.f_locals['self']) is Fail",
    ),
    Case(
        "c: user keeps the traceback",
        (FAILED, "import sys\ntb = sys.last_traceback; del learn"),
        _REPORTED,
        holder=r"\btb\b",
        errors=(1,),
    ),
    Case(
        "c: user keeps a frame",
        ("import sys\ndef go():\n    big = torch.ones(900); track('model', big)\n    return sys._getframe()\nfr = go()",),
        _REPORTED,
        holder=r"\bfr\b",
        check="assert fr.f_locals['big'].sum() == 900",
    ),
    Case(
        "c: user keeps the cause",
        (_MAKE + "\ntry: learn.fit(1)\nexcept Exception as e: err = e\nraise KeyError('x') from err", "del learn"),
        _REPORTED,
        holder=r"\berr\b",
        errors=(1,),
        check="str(err)",
    ),
    Case(
        "c: traceback text only",
        (
            _MAKE
            + "\nimport traceback\ntry: learn.fit(1)\nexcept Exception as e: te = traceback.TracebackException.from_exception(e, capture_locals=False); del e",
            "del learn",
        ),
        _FREED,
    )
    if False
    else Case(
        "c: future result",
        (
            "from concurrent.futures import ThreadPoolExecutor\nex = ThreadPoolExecutor(1); fut = ex.submit(lambda: learner().model); track('model', fut.result())",
        ),
        _REPORTED,
        holder=r"\bfut\b",
        check="fut.result()(torch.randn(2,16))",
    ),
    Case(
        "c: executor kept, future dropped",
        (
            "from concurrent.futures import ThreadPoolExecutor\n"
            + _MAKE
            + "\nex = ThreadPoolExecutor(1); fut = ex.submit(learn.fit, 1)\ntry: fut.result()\nexcept Exception: pass",
            "gc.disable(); del fut, learn",
        ),
        _FREED,
    ),
    Case(
        "c: coroutine never awaited",
        ("async def go(l): l.fit(1)\nlearn = learner(); track('model', learn.model); co = go(learn)\ndel learn",),
        _REPORTED,
        holder=r"\bco\b",
        check="co.close()",
    ),
    Case(
        "c: async generator",
        (
            "async def ag(l):\n    yield 1\n    l.fit(1)\nlearn = learner(); track('model', learn.model); g = ag(learn); await g.__anext__()\ndel learn",
        ),
        _REPORTED,
        holder=r"\bg\b",
        check="async for x in g: pass",
    ),
    Case(
        "c: pending task, unnamed",
        (
            "import asyncio\nasync def go(l):\n    await asyncio.sleep(30)\n    l.fit(1)\nlearn = learner(); track('model', learn.model)\nasyncio.get_running_loop()._keep = asyncio.ensure_future(go(learn)); await asyncio.sleep(0)\ndel learn",
        ),
        {"model": "kept"},
        check="asyncio.get_running_loop()._keep.cancel()",
    ),
    Case(
        "c: timer",
        (
            "import threading\nlearn = learner(); track('model', learn.model)\ntm = threading.Timer(60, learn.fit, (1,)); tm.start()\ndel learn",
        ),
        _REPORTED,
        holder=r"\btm\b",
        check="tm.cancel()",
    ),
    Case(
        "c: debugger assigned a variable",
        (FAILED, "%debug", "del learn"),
        _FREED,
        errors=(1,),
        inputs=("u", "!keepme = self", "p self", "q"),
    ),
    Case(
        "c: debug twice",
        (FAILED, "%debug", "%debug", "del learn"),
        _FREED,
        errors=(1,),
        inputs=("u", "u", "u", "p locals()", "q"),
    ),
    Case(
        "c: set_trace",
        (
            "def go(l):\n    m = l.model\n    from IPython.core.debugger import set_trace; set_trace()\n    return m\nlearn = learner(); track('model', learn.model)\ngo(learn); 1",
            "del learn",
        ),
        _FREED,
        errors=(1,),
        inputs=("n", "q"),
    ),
    Case(
        "c: set_trace, continued",
        (
            "def go(l):\n    m = l.model\n    from IPython.core.debugger import set_trace; set_trace()\n    return None\nlearn = learner(); track('model', learn.model)\ngo(learn); 1",
            "del learn",
        ),
        _FREED,
        inputs=("n", "c"),
    ),
    Case("c: debug works after", (FAILED, "del learn"), _FREED, errors=(1,), check="%debug\n"),
    Case("c: xmode Minimal", ("%xmode Minimal", FAILED, "del learn"), _FREED, errors=(2,)),
    Case(
        "c: Output widget",
        (_MAKE, "import ipywidgets\nw = ipywidgets.Output()\nwith w: learn.fit(1)", "del learn"),
        _FREED,
        errors=(2,),
    ),
    Case(
        "c: nested group",
        (
            "if sys.version_info < (3, 11): raise SystemError\n"
            if False
            else "learn = learner(cbs=Fail()); track('model', learn.model)\ntry: learn.fit(1)\nexcept Exception as e: found = e\ntry: G = ExceptionGroup\nexcept NameError: G = lambda t, es: es[0]\ntry: raise G('inner', [found])\nexcept Exception as e: group = G('outer', [KeyError(), e])\ndel found\ntry: raise group from None\nfinally: del group",
            "del learn",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: TaskGroup",
        (
            "import asyncio\nasync def go(l): l.fit(1)\nasync def main(l):\n    try: TG = asyncio.TaskGroup\n    except AttributeError: return l.fit(1)\n    async with TG() as tg: tg.create_task(go(l))\n"
            + _MAKE
            + "\nawait main(learn)",
            "del learn",
        ),
        _FREED,
        errors=(1,),
    ),
    Case("c: AttributeError on learner", (TRAINED, "learn.nothing", "del learn"), _FREED, errors=(2,)),
    Case(
        "c: NameError in fit",
        (
            "class N(Net):\n    def forward(s, x): return undefined_thing\nlearn = learner(model=N()); track('model', learn.model)\nlearn.fit(1)",
            "del learn",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "c: StopIteration value",
        ("def gen():\n    t = torch.ones(900); track('model', t)\n    return t\n    yield\nnext(gen())",),
        _REPORTED,
        holder="last error",
        errors=(1,),
    ),
    Case("c: KeyError with learner as key", (TRAINED, "{}[learn]", "del learn"), _REPORTED, holder="last error", errors=(2,)),
    Case(
        "c: error in __del__",
        (
            "class D:\n    def __init__(s): s.t = torch.ones(900); track('model', s.t)\n    def __del__(s): raise ValueError\nd = D()",
            "del d",
        ),
        {},
        "",
    ),
    Case(
        "c: error in event callback",
        (
            _MAKE,
            "def hook(*a):\n    get_ipython().events.unregister('pre_run_cell', hook); learn.fit(1)\nget_ipython().events.register('pre_run_cell', hook)",
            "1",
            "del learn, hook",
        ),
        _FREED,
        errors=(3,),
    ),
    Case(
        "c: two errors, older kept",
        (_MAKE + "\ntry: learn.fit(1)\nexcept Exception as e: first = e", "1/0", "del learn"),
        _REPORTED,
        holder=r"\bfirst\b",
        errors=(2,),
    ),
    Case(
        "c: errors dict",
        (
            "errs = {}\nfor lr in (1, 2):\n    l = learner(cbs=Fail()); track('model', l.model)\n    try: l.fit(1)\n    except Exception as e: errs[lr] = e\ndel l",
        ),
        _REPORTED,
        holder=r"\berrs\b",
    ),
    Case(
        "c: errors dict as target",
        (
            "errs = {}\nfor lr in (1, 2):\n    l = learner(cbs=Fail()); track('model', l.model)\n    try: l.fit(1)\n    except Exception as e: errs[lr] = e\ndel l",
        ),
        _FREED,
        "errs",
    ),
    Case("c: err as target", (_MAKE + "\ntry: learn.fit(1)\nexcept Exception as e: err = e",), _FREED, "learn err"),
    Case(
        "c: learner kept after error, fit again",
        (FAILED,),
        {"model": "kept"},
        errors=(1,),
        check="learn.remove_cb(Fail); learn.fit(1)",
    ),
    Case(
        "c: run script fails",
        (
            "open('s.py','w').write('import torch\\ndef f():\\n    big = torch.ones(900); track(\"model\", big)\\n    raise ValueError\\nf()')\nbuiltins.track = track",
            "%run s.py",
        ),
        _FREED,
        errors=(2,),
    ),
    Case(
        "c: run script fails, its global",
        (
            "open('s.py','w').write('import torch\\nbig = torch.ones(900); track(\"model\", big)\\nraise ValueError\\n')\nbuiltins.track = track",
            "%run s.py",
        ),
        _REPORTED,
        holder=r"last error|\bbig\b",
        errors=(2,),
    ),
    Case(
        "c: interrupted in a loader loop",
        (
            "def loop(dl):\n    for xb, yb in dl:\n        track('model', xb); raise KeyboardInterrupt\ndls = data(); loop(dls.train)",
        ),
        _FREED,
        errors=(1,),
        check="dls.one_batch()",
    ),
    Case(
        "c: closure shared by a kept function",
        (
            "def make():\n    m = Net(); track('k', m)\n    def fwd(x): return m(x)\n    def bad():\n        big = torch.ones(900); track('model', big); m; raise ValueError\n    return fwd, bad\nfwd, bad = make(); bad()",
        ),
        {"model": "freed", "k": "kept"},
        errors=(1,),
        check="fwd(torch.randn(2,16))",
    ),
    Case(
        "c: generator kept, failed elsewhere",
        (
            "def gen():\n    m = Net(); track('k', m)\n    while True: yield m\ng = gen()\ndef use(g):\n    m = next(g); big = torch.ones(900); track('model', big)\n    raise ValueError\nuse(g)",
        ),
        {"model": "freed", "k": "kept"},
        errors=(1,),
        check="next(g)(torch.randn(2,16))",
    ),
    Case(
        "c: thread keeps the failed frame's tensor",
        (
            "import threading\nev = threading.Event(); res = []\ndef work(t):\n    ev.wait(60); res.append(float(t.sum()))\ndef go():\n    big = torch.ones(900); track('k', big); small = torch.ones(300); track('model', small)\n    th = threading.Thread(target=work, args=(big,)); th.start()\n    raise ValueError\ngo()",
        ),
        {"model": "freed", "k": "kept"},
        errors=(1,),
        check="ev.set(); [time.sleep(.05) for _ in range(600) if not res]; assert res == [900.]",
    ),
    Case(
        "x: two attributes same learner",
        ("class E: pass\ne = E(); e.a = e.b = learner(); track('model', e.a.model)",),
        {"model": "kept"},
        "e.a",
        check="e.b.fit(1)",
    ),
    Case(
        "x: two slots same learner",
        ("class E: __slots__ = ('a', 'b')\ne = E(); e.a = e.b = learner(); track('model', e.a.model)",),
        {"model": "kept"},
        "e.a",
        check="e.b.fit(1)",
    ),
    Case(
        "x: two keys same learner",
        ("e = {}; e['a'] = e['b'] = learner(); track('model', e['a'].model)",),
        {"model": "kept"},
        "e['a']",
        check="e['b'].fit(1)",
    ),
    Case(
        "x: both keys as targets",
        ("e = {}; e['a'] = e['b'] = learner(); track('model', e['a'].model)",),
        {"model": "freed"},
        "e['a'] e['b']",
        measured=True,
    ),
    Case(
        "x: kept locals()",
        (
            "def go():\n    big = torch.ones(900); track('k', big)\n    global snap; snap = locals()\n    raise ValueError\ngo()",
        ),
        {"k": "kept"},
        errors=(1,),
        check="assert snap['big'].sum() == 900",
    ),
    Case(
        "x: kept frame f_locals",
        (
            "def go():\n    big = torch.ones(900); track('k', big)\n    global fr; fr = sys._getframe(); fr.f_locals\n    return fr.f_locals\nsnap = go()",
        ),
        {"k": "kept"},
        check="assert snap['big'].sum() == 900 and fr.f_locals['big'].sum() == 900",
    ),
    Case(
        "x: exec with a kept function",
        (
            "ns = {'torch': torch, 'track': track}\nsrc = \"big = torch.ones(900); track('k', big)\\ndef f(): return big.sum()\\nraise ValueError\"\ntry: exec(src, ns)\nexcept ValueError: f = ns['f']\ndel ns\nraise KeyError",
        ),
        {"k": "kept"},
        errors=(1,),
        check="assert f() == 900",
    ),
    Case(
        "x: exec fails, function kept",
        (
            "class R: pass\nr = R()\nsrc = \"big = torch.ones(900); track('k', big)\\ndef f(): return big.sum()\\nr.f = f\\nraise ValueError\"\nexec(src, {'torch': torch, 'track': track, 'r': r})",
        ),
        {"k": "kept"},
        errors=(1,),
        check="assert r.f() == 900",
    ),
    Case(
        "x: df in df",
        ("df = pd.DataFrame({'l': [pd.DataFrame({'m': [learner()]})]}); track('model', df.l[0].m[0].model)",),
        _FREED,
        "df",
    ),
    Case(
        "x: object array of learners in a cycle",
        (
            "class B: pass\nb = B(); b.me = b; b.a = np.empty(2, object); b.a[0] = learner(); b.a[1] = B(); b.a[1].me = b.a[1]; b.a[1].a = np.array([learner(), None], object); track('model', b.a[1].a[0].model)",
        ),
        _FREED,
        "b",
    ),
    Case(
        "x: breakpoint()",
        (
            "def go(l):\n    m = l.model\n    breakpoint()\n    return None\nlearn = learner(); track('model', learn.model)\ngo(learn); 1",
            "del learn",
        ),
        _FREED,
        errors=(),
        inputs=("n", "q"),
    ),
    Case(
        "x: %debug statement",
        (
            "def go(l):\n    m = l.model\n    return None\nlearn = learner(); track('model', learn.model)",
            "%debug go(learn)",
            "del learn",
        ),
        _FREED,
        inputs=("s", "n", "n", "c"),
    ),
    Case(
        "x: exception with kept attributes and thread",
        (
            "import threading\nclass T(threading.Thread):\n    def run(s):\n        l = learner(cbs=Fail()); track('model', l.model)\n        try: l.fit(1)\n        except Exception as e: s.exc = e\nth = T(); th.start(); th.join()",
        ),
        _REPORTED,
        holder=r"\bth\b",
        check="str(th.exc)",
    ),
    Case(
        "x: generator failed, still named",
        ("def gen(l):\n    yield 1\n    l.fit(1)\n" + _MAKE + "\ng = gen(learn); next(g)", "next(g)", "del learn"),
        _FREED,
        errors=(2,),
    ),
    Case(
        "x: contextvar",
        (TRAINED, "import contextvars\ncv = contextvars.ContextVar('cv'); _ = cv.set(learn)\ndel learn, _"),
        _REPORTED,
        holder=r"\bcv\b|ontext",
        check="cv.get().fit(1)",
    ),
    Case(
        "x: parameter list and dict",
        (
            "pl = nn.ParameterList([nn.Parameter(torch.ones(99))]); track('a', pl[0]); sd = Net().state_dict(); track('b', sd['head.bias'])",
        ),
        {"a": "freed", "b": "freed"},
        "pl sd",
    ),
    Case(
        "x: state dict element",
        ("sd = Net().state_dict(); track('b', sd['head.weight']); track('k', sd['body.weight'])",),
        {"k": "kept", "b": "freed"},
        "sd['head.weight']",
        check="sd['body.weight'].sum()",
    ),
    Case(
        "x: parameterlist element",
        (
            "pl = nn.ParameterList([nn.Parameter(torch.ones(99)), nn.Parameter(torch.ones(98))]); track('a', pl[0]); track('k', pl[1])",
        ),
        {"k": "kept"},
        "",
        check="pl[1].sum()",
    ),
    Case(
        "x: sequential element",
        ("m = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 8)); track('b', m[0]); track('k', m[1])",),
        {"k": "kept", "b": "freed"},
        "m[0]",
    ),
    Case(
        "x: module list element",
        ("m = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 8)]); track('b', m[-1]); track('k', m[0])",),
        {"k": "kept", "b": "freed"},
        "m[-1]",
    ),
    Case(
        "x: subclass and sparse",
        (
            "class S(torch.Tensor): pass\nt = torch.ones(77).as_subclass(S); track('t', t); sp = torch.eye(64).to_sparse(); track('sp', sp._values()); csr = torch.eye(32).to_sparse_csr(); track('csr', csr.values())",
        ),
        {"t": "freed", "sp": "freed", "csr": "freed"},
        "t sp csr",
    ),
    Case(
        "x: compiled model",
        ("m = Net(); cm = torch.compile(m, backend='eager'); cm(torch.randn(2, 16)); track('model', m)",),
        _FREED,
        "m cm",
    ),
    Case(
        "x: compiled model, one kept",
        ("m = Net(); cm = torch.compile(m, backend='eager'); _ = cm(torch.randn(2, 16)); track('model', m); del _",),
        {"model": "kept"},
        "m",
        check="cm(torch.randn(2, 16))",
    ),
    Case(
        "x: TensorImage subclass displayed",
        ("ti = TensorImage(torch.ones(3, 8, 8)); track('ti', ti); ti", "del ti"),
        {"ti": "kept"},
        check="Out[2].sum()",
    ),
    Case(
        "x: cpu pickled copy",
        ("import copy\na = Net(); b = copy.deepcopy(a); track('a', a); track('b', b)",),
        {"a": "freed", "b": "kept"},
        "a",
        check="b(torch.randn(2,16))",
    ),
    Case(
        "x: EMA buffer sharing views",
        ("big = torch.ones(1000); v = big[:10]; track('big', big)",),
        {"big": "kept"},
        "big",
        check="v.sum()",
    ),
    Case(
        "x: a failed function's variable that a task will use",
        (
            "import asyncio\ndef run():\n    model = Net(); track('model', model)\n    go = asyncio.Event(); get_ipython().user_ns['go'] = go\n"
            "    async def later():\n        await go.wait(); builtins.shape = model(torch.randn(2, 16)).shape\n"
            "    asyncio.ensure_future(later())\n    raise RuntimeError('failed on purpose')\nrun()",
        ),
        {"model": "kept"},
        errors=(1,),
        check="go.set(); await asyncio.sleep(0.2); assert builtins.shape == (2, 3)",
    ),
    Case(
        "x: displayed, and held by a library",
        (TRAINED, "learn", "import json; json.current = learn; del learn"),
        _REPORTED,
        holder=r"json\.current",
        by_library=True,
    ),
    Case(
        "x: torch.compile fails in a backend",
        (
            "model = Net(); track('model', model)\ndef bad(graph, example): raise RuntimeError('failed on purpose')\n"
            "compiled = torch.compile(model, backend=bad)\ncompiled(torch.randn(2, 16))",
            "del model, compiled",
        ),
        _FREED,
        errors=(1,),
    ),
    Case(
        "x: held by IPython's own settings",
        (TRAINED, "get_ipython().input_transformers_post.append(lambda lines, l=learn: lines); del learn"),
        _REPORTED,
        holder="input_transformers_post",
    ),
    Case(
        "y: the default of a function that runs at exit",
        (TRAINED, "import atexit\ndef save(l=learn): ...\natexit.register(save)\ndel learn, save"),
        _REPORTED,
        holder=r"atexit callback save",
    ),
    Case(
        "y: the argument of a function that runs at exit",
        (TRAINED, "import atexit\natexit.register(print, learn); del learn"),
        _REPORTED,
        holder=r"does not show",
    ),
    Case(
        "y: the argument of a finalizer",
        (TRAINED, "class Key: pass\nkey = Key(); weakref.finalize(key, print, learn); del learn"),
        _REPORTED,
        holder=r"weakref\.finalize",
        by_library=True,
    ),
    Case(
        "y: a hook on a node of a graph",
        (
            TRAINED,
            "y = torch.ones(3, requires_grad=True) * 2\ny.grad_fn.register_hook(lambda *grads, l=learn: None); del learn",
        ),
        _REPORTED,
        holder=r"\by \(Tensor 3 float32\) .*: %reset_gpu y$",
    ),
    Case(
        "y: the record that a handler keeps back",
        (
            TRAINED,
            "import logging, logging.handlers\nlog = logging.getLogger('kept')\n"
            "log.addHandler(logging.handlers.MemoryHandler(99, flushLevel=99)); log.propagate = False\n"
            "log.warning('%s', learn); del learn",
        ),
        _REPORTED,
        holder=r"logging\.getLogger\('kept'\)\.handlers\[0\]\.buffer",
    ),
    Case(
        "y: work that waits in an executor",
        (
            TRAINED,
            "import threading\nfrom concurrent.futures import ThreadPoolExecutor\nend = threading.Event()\n"
            "pool = ThreadPoolExecutor(1); pool.submit(end.wait); pool.submit(print, learn); del learn",
        ),
        _REPORTED,
        holder=r"\bpool\b",
        check="end.set()",
    ),
)
