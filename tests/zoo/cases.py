"""Notebook states that keep memory alive, or must keep it: what a cleanup has to do about each is known by construction.

A case's cells run in a real kernel; `track(name, object)` notes weak references by which its truth is diagnosed.
"""

from __future__ import annotations

from dataclasses import dataclass

SHOWS_SMALL = '__import__("nbguard.memory.core.advice", fromlist=["MiB"]).__dict__.update(MiB=1, _PART=1 << 40)'
"""Has nbguard show small holders, too: the models of the zoo have 10 KiB."""

PRELUDE = (
    SHOWS_SMALL
    + """
import builtins, gc, os, signal, sys, time, weakref
from fastai.basics import *
from fastai.callback.all import *
from torch.multiprocessing.reductions import StorageWeakRef
builtins._tracked, builtins._devices = {}, set()
def track(name, obj):
    "Note how to tell later whether `obj` and its memory are gone."
    gone = builtins._tracked.setdefault(name, [])
    tensors = [obj] if isinstance(obj, torch.Tensor) else list(obj.parameters()) if isinstance(obj, nn.Module) else []
    gone.extend(StorageWeakRef(t.untyped_storage()).expired for t in tensors)
    builtins._devices.update(str(t.device) for t in tensors)
    if not isinstance(obj, torch.Tensor):
        gone.append(lambda ref=weakref.ref(obj): ref() is None)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 48), nn.Linear(48, 3)
    def forward(self, x): return self.head(self.body(x).relu())
def data(**kw):
    rows = list(zip(torch.randn(48, 16), torch.randint(0, 3, (48,))))
    return DataLoaders.from_dsets(rows, rows, bs=12, device=torch.device('cpu'), num_workers=0, **kw)
def learner(dls=None, model=None, **kw):
    return Learner(dls or data(), model or Net(), loss_func=CrossEntropyLossFlat(), **kw)
class Fail(Callback):
    def after_loss(self):
        if self.training and self.iter == 1: raise RuntimeError('failed on purpose')
"""
)

TRAINED = "learn = learner(); learn.fit(1); track('model', learn.model); track('learner', learn)"
FAILED = "learn = learner(cbs=Fail()); track('model', learn.model); track('learner', learn)\nlearn.fit(1)"


@dataclass(frozen=True)
class Case:
    """One state. `want`: freed, kept or reported (alive, and the cleanup's text names a holder that matches `holder`).

    `stale` are the targets given to `%reset_gpu`; `errors` the numbers of cells that must fail; `check` a cell that must
    still work afterwards. `hidden`: bytes that C++ keeps out of sight on a device until a cleanup has undone that, so that they
    come on top of the promise. `measured`: a computed target (a slice, a property), which is freed and measured, not promised.
    `by_library`: an object that was there before the notebook holds it, so that looks must go through the libraries', too.
    """

    name: str
    cells: tuple[str, ...]
    want: dict[str, str]
    stale: str = ""
    holder: str = ""
    check: str = ""
    errors: tuple[int, ...] = ()
    inputs: tuple[str, ...] = ()
    measured: bool = False
    hidden: int = 0
    by_library: bool = False


CASES = (
    Case("a name", (TRAINED,), {"model": "freed", "learner": "freed"}, stale="learn"),
    Case(
        "a name of two: the other still needs it",
        (TRAINED, "best = learn"),
        {"model": "kept"},
        "learn",
        check="best.validate()",
    ),
    Case(
        "an attribute",
        ("class Exp: pass\nexp = Exp()\nexp.learn = learner(); track('model', exp.learn.model)",),
        {"model": "freed"},
        "exp.learn",
    ),
    Case(
        "a dict entry whose key has a blank",
        (
            "runs = {k: learner() for k in ('my run', 'other')}; track('model', runs['my run'].model); track('other', runs['other'].model)",
        ),
        {"model": "freed", "other": "kept"},
        "runs['my run']",
        check="runs['other'].fit(1)",
    ),
    Case(
        "a list element by index",
        ("runs = [learner(), learner()]; track('first', runs[0].model); track('last', runs[1].model)",),
        {"first": "kept", "last": "freed"},
        "runs[-1]",
        check="assert len(runs) == 1",
    ),
    Case(
        "a shared model",
        (TRAINED, "model = learn.model"),
        {"model": "kept", "learner": "freed"},
        "learn",
        check="model(torch.randn(2, 16))",
    ),
    Case(
        "a submodule",
        ("net = Net(); track('body', net.body); track('head', net.head)",),
        {"head": "freed", "body": "kept"},
        "net.head",
    ),
    Case("displayed, then deleted", (TRAINED, "learn", "del learn"), {"model": "freed", "learner": "freed"}),
    Case("displayed and given as target", (TRAINED, "learn", "1"), {"model": "freed"}, "learn"),
    Case("displayed inside a tuple", (TRAINED, "(learn, 3)", "del learn"), {"model": "freed"}),
    Case("a displayed bound method", (TRAINED, "learn.fit", "del learn"), {"model": "freed"}),
    Case("a displayed iterator over the model", (TRAINED, "learn.model.children()", "del learn"), {"model": "freed"}),
    Case(
        "displayed, and still named",
        (TRAINED, "learn", "1"),
        {"model": "kept"},
        check="assert Out[3] is learn; learn.fit(1)",
    ),
    Case(
        "a displayed tensor nobody names",
        ("t = torch.ones(500); track('t', t); t", "del t", TRAINED, "learn", "del learn"),
        {"t": "kept", "model": "freed"},
        check="assert Out[2].sum() == 500 and _2 is Out[2]",
    ),
    Case(
        "a displayed result with data of its own",
        (
            TRAINED,
            "preds = torch.ones(300); track('preds', preds); {'model': learn.model, 'preds': preds}",
            "del learn, preds",
        ),
        {"preds": "kept", "model": "reported"},
        holder=r"Out\[3\]",
        check="assert Out[3]['preds'].sum() == 300",
    ),
    Case(
        "a displayed pipeline with small tables in its scheduler",
        (
            "class Scheduler:\n    def __init__(self): self.betas = torch.arange(31.0); self.steps = [self.betas[:4].clone()]\n"
            "class Pipeline:\n    def __init__(self): self.unet, self.vae, self.scheduler = nn.Linear(300, 100), Net(), Scheduler()\n"
            "pipe = Pipeline(); track('unet', pipe.unet); track('vae', pipe.vae); track('betas', pipe.scheduler.betas)",
            "pipe",
            "del pipe",
        ),
        {"unet": "freed", "vae": "freed", "betas": "freed"},
    ),
    Case("a result named as target", ("t = torch.ones(500); track('t', t); t", "del t"), {"t": "freed"}, "Out[2]"),
    Case(
        "an underscore of the user's",
        ("for _ in [learner()]: track('model', _.model)",),
        {"model": "kept"},
        check="_.fit(1)",
    ),
    Case("an error in fit", (FAILED, "del learn"), {"model": "freed", "learner": "freed"}, errors=(1,)),
    Case(
        "an error in a fit with mixed precision",
        ("learn = learner(cbs=Fail()).to_fp16(); track('model', learn.model)", "learn.fit(1)", "del learn"),
        {"model": "freed"},
        errors=(2,),
        hidden=2560,  # autocast's cache of half precision weights
    ),
    Case(
        "an error, looked at in the debugger",
        (FAILED, "%debug", "del learn"),
        {"model": "freed"},
        errors=(1,),
        inputs=("u", "u", "q"),
    ),
    Case(
        "an error chained to another",
        (
            "learn = learner(cbs=Fail()); track('model', learn.model)\ntry: learn.fit(1)\nexcept Exception as e: raise KeyError('later') from e",
            "del learn",
        ),
        {"model": "freed"},
        errors=(1,),
    ),
    Case(
        "an error group",
        (
            "learn = learner(cbs=Fail()); track('model', learn.model)\nfound = []\ntry: learn.fit(1)\nexcept Exception as e: found.append(e)\n"
            "try: from builtins import ExceptionGroup as Group\nexcept ImportError: Group = lambda text, errors: errors[0]\n"
            "group = Group('both', found); del found\ntry: raise group\nfinally: del group",
            "del learn",
        ),
        {"model": "freed"},
        errors=(1,),
    ),
    Case(
        "an interrupted fit of a learner that is kept",
        (
            "class Stop(Callback):\n    def after_loss(self):\n        if self.iter == 1: track('pred', self.learn.pred); track('xb', self.learn.xb[0]); raise KeyboardInterrupt\n"
            "learn = learner(); track('model', learn.model)\nlearn.fit(2, cbs=Stop())",
        ),
        {"pred": "freed", "xb": "freed", "model": "kept"},
        errors=(1,),
        check="learn.fit(1)",
    ),
    Case(
        "a local tensor, also in a closure that lives on",
        (
            "def outer():\n    big = torch.ones(700); track('big', big)\n    global use\n    use = lambda: big.sum()\n    raise ValueError\nouter()",
        ),
        {"big": "kept"},
        errors=(1,),
        check="assert use() == 700",
    ),
    Case(
        "a local tensor in a closure of the failed function",
        (
            "def outer():\n    big = torch.ones(700); track('big', big)\n    inner = lambda: big.sum()\n    raise ValueError\nouter()",
        ),
        {"big": "freed"},
        errors=(1,),
    ),
    Case(
        "an exception kept by the user",
        (f"try:\n    {FAILED.replace(chr(10), chr(10) + '    ')}\nexcept Exception as e: err = e", "del learn"),
        {"model": "reported"},
        holder=r"\berr\b",
        check="assert 'on purpose' in str(err)",
    ),
    Case(
        "a bound method in a variable",
        (TRAINED, "go = learn.fit_one_cycle\ndel learn"),
        {"model": "reported"},
        holder=r"\bgo\b",
        check="go(1)",
    ),
    Case(
        "a closure in a variable",
        (TRAINED, "def again(l=learn): return l.fit(1)\ndel learn"),
        {"model": "reported"},
        holder=r"\bagain\b",
        check="again()",
    ),
    Case(
        "a cell run again: the earlier Learner",
        (TRAINED, "gc.disable(); learn = learner(); gc.enable()"),
        {"model": "freed"},
        check="learn.fit(1)",
    ),
    Case(
        "everything but one",
        (TRAINED, "keep = torch.ones(9); track('keep', keep); other = torch.ones(8); track('other', other)"),
        {"model": "freed", "keep": "kept", "other": "freed"},
        "--all --keep keep",
    ),
    Case(
        "a DataFrame and a tensor of the user's",
        (TRAINED, "df = pd.DataFrame({'x': [1]}); t = torch.ones(5); track('t', t); track('df', df)", "del learn"),
        {"t": "kept", "df": "kept"},
        check="df.x + 1, t + 1",
    ),
    Case(
        "a running thread",
        (
            "learn = learner(); track('model', learn.model)\nimport threading\nend = threading.Event()\ndef work(l):\n    end.wait(60)\n    l.validate()\nthread = threading.Thread(target=work, args=(learn,)); thread.start()\ndel learn",
        ),
        {"model": "kept"},
        check="end.set(); thread.join()",
    ),
    Case("displayed by display(), not as a result", (TRAINED, "display(learn)", "del learn"), {"model": "freed"}),
    Case("a displayed optimizer", (TRAINED, "learn.opt", "del learn"), {"model": "freed"}),
    Case("a displayed callback", (TRAINED, "learn.recorder", "del learn"), {"model": "freed"}),
    Case("displayed twice", (TRAINED, "learn", "learn", "del learn"), {"model": "freed"}),
    Case("displayed by a magic", (TRAINED, "%time learn", "del learn"), {"model": "freed"}),
    Case("a displayed partial", (TRAINED, "partial(learn.fit, 1)", "del learn"), {"model": "freed"}),
    Case(
        "a displayed learner that shares its named loaders",
        ("dls = data(); learn = learner(dls); track('model', learn.model); track('dls', dls)", "learn", "del learn"),
        {"model": "freed", "dls": "kept"},
        check="dls.one_batch()",
    ),
    Case("%pdb on", ("%pdb on", FAILED, "del learn"), {"model": "freed"}, errors=(2,), inputs=("u", "q")),
    Case(
        "an error while an error is handled",
        (
            "learn = learner(cbs=Fail()); track('model', learn.model)\ntry: learn.fit(1)\nexcept Exception: 1 / 0",
            "del learn",
        ),
        {"model": "freed"},
        errors=(1,),
    ),
    Case(
        "two errors, the learner of the first kept by none",
        (FAILED, "other = learner(cbs=Fail()); track('second', other.model); other.fit(1)", "del learn, other"),
        {"second": "freed"},
        errors=(1, 2),
    ),
    Case(
        "an error in a magic's line",
        ("learn = learner(cbs=Fail()); track('model', learn.model)", "%time learn.fit(1)", "del learn"),
        {"model": "freed"},
        errors=(2,),
    ),
    Case(
        "an error in a cell with await",
        (
            "import asyncio; learn = learner(cbs=Fail()); track('model', learn.model)",
            "await asyncio.sleep(0); learn.fit(1)",
            "del learn",
        ),
        {"model": "freed"},
        errors=(2,),
    ),
    Case(
        "an error in a generator",
        (
            "def batches(l):\n    for i in range(3):\n        yield l.model(torch.randn(2, 16))\n        if i: raise ValueError\nlearn = learner(); track('model', learn.model)\nfor b in batches(learn): pass",
            "del learn, b",
        ),
        {"model": "freed"},
        errors=(1,),
    ),
    Case(
        "a log record with the exception, in a list",
        (
            "import logging\nclass Keep(logging.Handler):\n    records = []\n    def emit(self, record): self.records.append(record)\nhandler = Keep(); log = logging.getLogger('zoo'); log.addHandler(handler); log.propagate = False\nlearn = learner(cbs=Fail()); track('model', learn.model)\ntry: learn.fit(1)\nexcept Exception: log.exception('failed')",
            "del learn",
        ),
        {"model": "reported"},
        holder=r"\b(handler|log|Keep)\b",
    ),
    Case(
        "a log record with the exception, held by logging alone",
        (
            "import logging, logging.handlers\nlog = logging.getLogger('zoo'); log.addHandler(logging.handlers.MemoryHandler(99, flushLevel=99)); log.propagate = False\nlearn = learner(cbs=Fail()); track('model', learn.model)\ntry: learn.fit(1)\nexcept Exception: log.exception('failed')",
            "del learn, log",
        ),
        {"model": "reported"},
        holder=r"logging",
    ),
    Case(
        "a task that failed",
        (
            "import asyncio\nasync def go(l): l.fit(1)\nlearn = learner(cbs=Fail()); track('model', learn.model)\ntask = asyncio.ensure_future(go(learn)); await asyncio.wait([task])",
            "del learn",
        ),
        {"model": "reported"},
        holder=r"\btask\b",
    ),
    Case(
        "an exception on an object",
        (
            "class Run: pass\nrun = Run(); learn = learner(cbs=Fail()); track('model', learn.model)\ntry: learn.fit(1)\nexcept Exception as e: run.error = e",
            "del learn",
        ),
        {"model": "reported"},
        holder=r"\brun\b",
        check="str(run.error)",
    ),
    Case(
        "an error whose argument is the model",
        ("net = Net(); track('model', net)\nraise ValueError(net)", "del net"),
        {"model": "reported"},
        holder="last error",
        errors=(1,),
    ),
    Case(
        "a variable in a class body that failed",
        ("net = Net(); track('model', net)\nclass Broken:\n    held = net\n    raise ValueError", "del net"),
        {"model": "freed"},
        errors=(1,),
    ),
    Case(
        "a module global of the user's",
        (
            "open('zmod.py', 'w').write('STATE = []')\nimport zmod; learn = learner(); track('model', learn.model); zmod.STATE.append(learn)",
            "del learn",
        ),
        {"model": "reported"},
        holder=r"zmod\.STATE",
    ),
    Case(
        "a class attribute of the user's",
        ("class Best: model = None\nBest.model = Net(); track('model', Best.model)",),
        {"model": "kept"},
        check="Best.model(torch.randn(1, 16))",
    ),
    Case(
        "a tensor in an object array",
        ("arr = np.empty(1, dtype=object); arr[0] = torch.ones(60); track('t', arr[0])",),
        {"t": "kept"},
        check="arr[0].sum()",
    ),
    Case(
        "a tensor in an untracked tuple of a big list",
        (
            "arr = np.empty(1, dtype=object); arr[0] = torch.ones(60); track('t', arr[0]); rows = [(i, arr) for i in range(900)]; del arr",
        ),
        {"t": "kept"},
        check="rows[3][1][0].sum()",
    ),
    Case(
        "a model that only a graph keeps",
        ("net = Net(); track('body', net.body.weight); loss = net(torch.randn(3, 16)).sum(); del net",),
        {"body": "kept"},
        check="loss.backward()",
    ),
    Case(
        "a suspended generator",
        (
            "learn = learner(); track('model', learn.model)\ndef gen(l):\n    yield 1\n    l.validate()\ng = gen(learn); next(g); del learn",
        ),
        {"model": "kept"},
        check="list(g)",
    ),
    Case(
        "an iterator with workers, named",
        (
            "dl = torch.utils.data.DataLoader(list(zip(torch.randn(64, 4), torch.arange(64))), batch_size=8, num_workers=2); track('data', dl.dataset[0][0]); it = iter(dl); xb = next(it)",
        ),
        {"data": "freed"},
        "dl it xb",
        check="import multiprocessing as mp; time.sleep(.5); assert not mp.active_children()",
    ),
    Case(
        "gc frozen",
        (TRAINED, "gc.disable(); del learn; gc.freeze(); gc.enable()"),
        {"model": "freed"},
        by_library=True,  # it shares their list
    ),
    Case(
        "globals of a script that has run",
        (
            "open('script.py', 'w').write('import torch\\nbig = torch.ones(900)\\ndef f(): return big.sum()\\n')\n%run script.py\ntrack('data', big)",
            "del big, f",
        ),
        {"data": "freed"},
    ),
    Case(
        "globals of a script, a function of which is still named",
        (
            "open('script.py', 'w').write('import torch\\nbig = torch.ones(900)\\ndef f(): return big.numel()\\n')\n%run script.py\ntrack('data', big)",
            "del big",
        ),
        {"data": "kept"},
        check="assert f() == 900",
    ),
    Case(
        "what %store has written",
        ("t = torch.ones(900); track('data', t)\n%store t", "del t"),
        {"data": "freed"},
        check="%store -r t\nassert t.sum() == 900",
    ),
    Case(
        "collected, and kept by gc for debugging",
        (
            "gc.set_debug(gc.DEBUG_SAVEALL)\nlearn = learner(); learn.fit(1); track('w', learn.model.body.weight)",
            "del learn; gc.collect()",
        ),
        {"w": "freed"},
        check="assert gc.get_debug() == gc.DEBUG_SAVEALL",
    ),
    Case(
        "an open figure's callback",
        (
            "%config InlineBackend.close_figures=False\nimport matplotlib.pyplot as plt\nt = torch.ones(900); track('data', t)\nfig = plt.figure(); fig.canvas.mpl_connect('pick_event', lambda event, t=t: t.sum());",
            "del t, fig",
        ),
        {"data": "freed"},
    ),
    Case(
        "a named figure's callback",
        (
            "%config InlineBackend.close_figures=False\nimport matplotlib.pyplot as plt\nt = torch.ones(900); track('data', t)\nfig = plt.figure(); fig.canvas.mpl_connect('pick_event', lambda event, t=t: t.sum());",
            "del t",
        ),
        {"data": "kept"},
        check="assert plt.gcf() is fig",
    ),
    Case(
        "a signal handler",
        (TRAINED, "signal.signal(signal.SIGUSR1, (lambda l: lambda *args: l)(learn))\ndel learn", "1"),
        {"model": "reported"},
        holder="signal handler SIGUSR1",
    ),
    Case(
        "a callback of IPython's events",
        (
            TRAINED,
            "def mk(l):\n    def post(*args): l\n    return post\nget_ipython().events.register('post_run_cell', mk(learn)); del learn",
        ),
        {"model": "reported"},
        holder="IPython event post_run_cell: post",
    ),
    Case(
        "a profile function",
        (TRAINED, "def mk(l):\n    def prof(*args): l\n    return prof\nsys.setprofile(mk(learn)); del learn"),
        {"model": "reported"},
        holder="sys.setprofile function",
    ),
    Case(
        "a callback of gc's",
        (TRAINED, "def mk(l):\n    def seen(*args): l\n    return seen\ngc.callbacks.append(mk(learn)); del learn"),
        {"model": "reported"},
        holder="gc callback seen",
    ),
    Case(
        "a magic of the user's",
        (
            TRAINED,
            "def mk(l):\n    def fit(line): l.fit(1)\n    return fit\nget_ipython().register_magic_function(mk(learn)); del learn",
        ),
        {"model": "reported"},
        holder="%fit",
    ),
    Case(
        "a mode of torch functions",
        (
            TRAINED,
            "from torch.overrides import TorchFunctionMode\nclass Mode(TorchFunctionMode):\n    def __init__(s, l): super().__init__(); s.l = l\n    def __torch_function__(s, f, t, a=(), k=None): return f(*a, **(k or {}))\nMode(learn).__enter__(); del learn",
            "1",
        ),
        {"model": "reported"},
        holder="torch mode Mode",
    ),
    Case(
        "hooks on saved tensors",
        (
            TRAINED,
            "hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, l=learn: t, lambda t: t); hooks.__enter__(); del hooks, learn",
        ),
        {"model": "reported"},
        holder="saved_tensors_hooks",
    ),
    Case(
        "the loss of a checkpointed model",
        (
            "from torch.utils.checkpoint import checkpoint\nnet, x = Net(), torch.ones(900, 16)",
            "loss = checkpoint(net, x, use_reentrant=False).sum(); track('model', net); track('data', x)",
            "del net, x",
        ),
        {"model": "freed", "data": "freed"},
        stale="loss",
    ),
    Case(
        "a training that survives, over",
        (
            "import nbguard\nmodel = Net(); opt = torch.optim.Adam(model.parameters()); track('model', model)",
            "guard = nbguard.survive(model, opt, items=4)\nwith guard: model(torch.ones(9, 16)).sum().backward(); opt.step()",
        ),
        {"model": "freed"},
        stale="model opt",
        check="assert guard.changes == []",
    ),
    Case(
        "a hook that refers to its own tensor",
        (
            "x = torch.ones(900, requires_grad=True); y = x * 2; track('data', y)\ny.register_hook(lambda grad, y=y: grad);",
            "del x, y",
        ),
        {"data": "freed"},  # nothing outside leads to it: a cleanup breaks the cycle, which Python's collector cannot see
    ),
    Case(
        "a view that its base keeps",
        ("base = torch.ones(900); track('data', base); base.part = base[:3]", "del base"),
        {"data": "freed"},
    ),
    Case(
        "an attribute that somebody put on the error",
        ("t = torch.ones(900); track('data', t)\nerror = ValueError('no'); error.batch = t\nraise error", "del t, error"),
        {"data": "freed"},
        errors=(1,),
    ),
    Case(
        "bars of an interrupted fit over data that has been replaced",
        (
            "class Stop(Callback):\n    def after_loss(self):\n        if self.iter == 2: raise KeyboardInterrupt\nlearn = learner(); track('model', learn.model); track('data', learn.dls.train.dataset[0][0])",
            "learn.fit(2, cbs=Stop())",
            "learn.dls = data()",
        ),
        {"model": "kept", "data": "freed"},
        check="learn.fit(1)",
        errors=(2,),
    ),
    Case(
        "gradients of a Learner in use",
        ("learn = learner(); learn.fit(1); track('model', learn.model); track('grad', learn.model.body.weight.grad)",),
        {"model": "kept", "grad": "reported"},
        holder=r"gradients of learn, .*learn\.model\.zero_grad",
        check="learn.model.zero_grad(); learn.fit(1)",
    ),
)
