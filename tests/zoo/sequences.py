"""Sequences of cells, as a long session has them, to run one among another after the prelude of the zoo."""

from __future__ import annotations

SEQUENCES: dict[str, tuple[str, ...]] = {
    "a module that is edited and reloaded": (
        "%load_ext autoreload\n%autoreload 2",
        (
            "open('mymod.py','w').write('import torch\\nfrom torch import nn\\nKEPT = []\\nclass "
            "Head(nn.Module):\\n    def __init__(self):\\n        super().__init__(); self.l = "
            "nn.Linear(300, 300)\\n    def forward(self, x): return self.l(x)\\ndef make():\\n    return "
            "Head()\\ndef keep(m):\\n    KEPT.append(m); return m\\n'); None"
        ),
        "import mymod\nhead = mymod.make()",
        "head = mymod.make()",
        "head = mymod.keep(mymod.make())",
        "time.sleep(1.1); s = open('mymod.py').read(); open('mymod.py','w').write(s + '\\nX = 3\\n'); None",
        "head = mymod.make()",
        "mymod.KEPT.clear()",
        "del head",
        "%autoreload 0",
    ),
    "a script": (
        (
            "open('script.py','w').write('import torch\\nfrom torch import nn\\nnet = nn.Linear(200, "
            "200)\\ndef use(): return net\\n'); None"
        ),
        "%run script.py",
        "del net",
        "%run script.py",
        "%run -i script.py",
        "net = None",
        "del use",
    ),
    "a closure": (
        "def outer():\n    m = nn.Linear(150, 150)\n    def inner(): return m\n    return inner, m",
        "f, m = outer()",
        "del m",
        "f = None",
    ),
    "a suspended generator": (
        "def batches(n):\n    for _ in range(n):\n        x = torch.randn(100, 100)\n        yield x",
        "g = batches(4); b = next(g)",
        "b = next(g)",
        "del b",
        "del g",
    ),
    "a generator expression": (
        "mods = [nn.Linear(50, 50) for _ in range(3)]; ge = (m.weight for m in mods); w = next(ge)",
        "del mods",
        "del w",
        "del ge",
    ),
    "a thread": (
        (
            "import threading\n"
            "ev = threading.Event()\n"
            "def work(m):\n"
            "    ev.wait(60)\n"
            "mt = nn.Linear(120, 120); th = threading.Thread(target=work, args=(mt,)); th.start()"
        ),
        "del mt",
        "ev.set(); th.join()",
        "del th",
    ),
    "errors": (
        "def broken(learn):\n    z = torch.ones(200, 200)\n    raise ValueError('x')",
        "big = nn.Linear(100, 100)\nbroken(big)",
        "del big",
        "1/0",
        "%reset_gpu",
        "big = nn.Linear(100, 100)\nbroken(big)",
        "big = nn.Linear(100, 100)",
        "%reset_gpu",
    ),
    "displayed results": (
        "om = nn.Linear(90, 90)\nom",
        "del om",
        "om = torch.ones(90, 90)",
        "om",
        "om = None",
        "%reset -f out",
    ),
    "fits": (
        "learn = learner(); learn.fit(1)",
        "learn = learner(); learn.fit(1)",
        "runs = [learn]",
        "learn = learner(); learn.fit(1)",
        "runs.clear()",
        "losses = [learn.model(torch.randn(4,16)).sum() for _ in range(3)]",
        "del learn",
        "del losses",
    ),
    "a cell that is run again": (
        "hist2 = []",
        "xx = torch.ones(64, 64); hist2.append(xx)",
        "xx = torch.ones(64, 64); hist2.append(xx)",
        "xx = torch.ones(64, 64); hist2.append(xx)",
        "xx = torch.ones(64, 64); hist2.append(xx)",
        "del hist2",
        "del xx",
    ),
    "magics": (
        "%%time\ntm = nn.Linear(80, 80)",
        "%%capture cap\ntm = nn.Linear(80, 80); tm",
        "%timeit -n1 -r1 tm(torch.ones(1, 80))",
        "%prun -q tm(torch.ones(1, 80))",
        "%time tm = nn.Linear(80, 80)",
        "del tm",
        "del cap",
    ),
    "names bound in passing": (
        "if (wm := nn.Linear(70, 70)) is not None: keepw = {'a': wm}",
        "for wm in [nn.Linear(70,70)]: pass",
        "del keepw",
        "for i, wm in enumerate([nn.Linear(30,30), nn.Linear(30,30)]): pass",
        "del wm",
    ),
    "globals": (
        "def setg():\n    global gm\n    gm = nn.Linear(60, 60)",
        "setg()",
        "hold = [gm]",
        "setg()",
        "exec('del gm')",
        "hold = None",
    ),
    "a class that is defined anew": (
        "class Exp:\n    def __init__(self): self.m = nn.Linear(110, 110)\n    def step(self): return self.m",
        "e = Exp(); cm = e.m",
        "class Exp:\n    pass",
        "del e",
        "del cm",
    ),
    "partials and caches": (
        "from functools import partial, lru_cache\npm = nn.Linear(40, 40); call = partial(pm, torch.ones(1, 40))",
        "pm = 3",
        "call = None",
        "@lru_cache\ndef cached(m): return m\npm = nn.Linear(40, 40); cached(pm); None",
        "del pm",
        "cached.cache_clear()",
    ),
    "views": (
        "images = torch.ones(200, 200)",
        "row = images[3]",
        "del images",
        "row = row.clone()",
        "im = torch.ones(100, 100).numpy(); t2 = torch.from_numpy(im)",
        "del t2",
        "del im",
        "del row",
    ),
    "an optimizer": (
        (
            "om2 = nn.Linear(100, 100); opt = torch.optim.Adam(om2.parameters()); "
            "om2(torch.ones(2,100)).sum().backward(); opt.step()"
        ),
        "del om2",
        "opt = None",
    ),
    "hooks": (
        "hm = nn.Linear(33, 33); acts = []\nh = hm.register_forward_hook(lambda m, i, o: acts.append(o))",
        "_ = hm(torch.ones(64, 33))",
        "del hm",
        "acts.clear()",
        "del h",
    ),
    "a task": (
        (
            "import asyncio\n"
            "async def later(m):\n"
            "    await asyncio.sleep(0.05); return m\n"
            "am = nn.Linear(77, 77); task = asyncio.ensure_future(later(am))"
        ),
        "del am",
        "await asyncio.sleep(0.2)",
        "task = None",
    ),
    "context managers": (
        "import contextlib\n@contextlib.contextmanager\ndef ctx():\n    m = nn.Linear(66, 66)\n    yield m",
        "with ctx() as cmod: pass",
        "c2 = ctx(); cmod = c2.__enter__()",
        "del cmod",
        "del c2",
    ),
    "IPython's ways to delete": (
        "zz = nn.Linear(55, 55); zl = [zz]",
        "%xdel zz",
        "%reset_selective -f zl",
        "zz = nn.Linear(55, 55); zl = (zz,)",
        "%reset_gpu zl",
        "del zz",
    ),
    "names that change places": (
        "p, q = nn.Linear(44, 44), nn.Linear(45, 45)",
        "p, q = q, p",
        "p = q",
        "p, *rest = [torch.ones(50, 50) for _ in range(3)]",
        "del p",
        "rest = None",
    ),
    "operations in place": (
        "acc = torch.zeros(80, 80)",
        "acc += 1",
        "acc = acc + 1",
        "acc2 = acc; acc = acc.add_(1)",
        "del acc",
        "acc2 = acc2.T",
        "acc2.resize_(1, 1); None",
        "del acc2",
    ),
    "state dicts and copies": (
        "sm = nn.Linear(88, 88); sd = sm.state_dict()",
        "sm = nn.Linear(88, 88)",
        "sm.load_state_dict(sd); sd = None",
        "import copy\nsm2 = copy.deepcopy(sm)",
        "del sm",
        "ps = list(sm2.parameters())",
        "del sm2",
        "del ps",
    ),
    "a figure": (
        (
            "import matplotlib; matplotlib.use('agg')\n"
            "import matplotlib.pyplot as plt\n"
            "fig, ax = plt.subplots(); px = torch.randn(60, 60); ax.imshow(px.numpy()); None"
        ),
        "del px",
        "plt.close('all')",
        "del fig, ax",
    ),
    "a data frame": (
        "import pandas as pd\ndl_m = nn.Linear(32, 32); df = pd.DataFrame({'m': [dl_m]})",
        "del dl_m",
        "df = None",
    ),
    "%store": (
        "st = torch.ones(70, 70)",
        "%store st",
        "del st",
        "%store -r st",
        "del st",
    ),
    "tracebacks": (
        "dm = nn.Linear(61, 61)\ndef fail(m):\n    y = m(torch.ones(3, 61))\n    raise KeyError(1)",
        "fail(dm)",
        "%tb",
        "dm = nn.Linear(61, 61)",
        "import sys; sys.last_value = None",
        "%reset_gpu",
        "del dm",
    ),
    "loaders": (
        "dl = torch.utils.data.DataLoader(torch.randn(64, 30), batch_size=8)\nfor batch in dl: pass",
        "it = iter(dl); batch = next(it)",
        "del batch",
        "del it",
        "del dl",
    ),
}
