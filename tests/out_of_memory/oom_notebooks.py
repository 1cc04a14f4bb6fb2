"""Notebooks that run out of memory on a device of 1024 MiB, 100 of them the context's: their cells, and the cell that fails."""

# ruff: noqa: E501 - a notebook is a row

from __future__ import annotations

from dataclasses import dataclass, field

PRELUDE = """
import gc, torch
from torch import nn
def mib(n, device='cuda'): return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)
"""

FIT = """
from fastai.basics import *
class Grow(nn.Module):
    def __init__(self, weights=0, width=4):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.more = nn.Parameter(torch.zeros(int(weights * 2**18))) if weights else None
        self.width = width
    def forward(self, x):
        kept = [torch.empty(int(self.width * len(x) * 2**20), dtype=torch.uint8, device=x.device) for _ in range(4)]
        out = self.body(x)
        return out if self.more is None else out + self.more.sum()
def loaders(bs): return DataLoaders(*[DataLoader([(torch.ones(4), torch.ones(4))] * 64, bs=bs) for _ in '12'], device='cuda')
def learner(bs=8, weights=0, width=4):
    return Learner(loaders(bs), Grow(weights, width).cuda(), loss_func=nn.MSELoss(), cbs=[])
def fit(learn):
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
"""


@dataclass(frozen=True, kw_only=True)
class OomNotebook:
    """A notebook whose last cell runs out of memory."""

    name: str  # of the test
    cells: tuple[str, ...] = ()  # run before the cell that fails
    cell: str  # runs out of memory
    fits: bool = False  # with fastai
    others: int = 0  # MiB that another process holds
    settings: dict[str, object] = field(default_factory=dict)  # of the device
    between: tuple[str, ...] = ()  # cells after which the failed cell is run once more, and fails again: that failure counts
    best: str | None = None  # verdict of the best advice; None: whichever
    loop: int = 2  # times that the best advice is followed and the cell run again, where it goes on failing


def _plain(name: str, *cells: str, **options: object) -> OomNotebook:
    return OomNotebook(name=name, cells=cells[:-1], cell=cells[-1], **options)  # type: ignore[arg-type]


NOTEBOOKS: tuple[OomNotebook, ...] = (
    # names and rebinding
    _plain("one name", "old = mib(500)", "x = mib(600)", best="rerun"),
    _plain("two names", "a, b, c = mib(300), mib(250), mib(300)", "x = mib(600)", best="rerun"),
    _plain("the old value", "x = mib(600)", "x = mib(600)", best="rerun"),
    _plain("the value that the cell replaces further on", "old = mib(500)", "x = mib(600)\nold = x[:1]", best="further"),
    _plain(
        "two values that the cell replaces, beside a name",
        "kept = mib(150); a, b = mib(200), mib(400)",
        "x = mib(600)\na = x[:1]\nb = x[:1]",
        best="further",
    ),
    _plain(
        "the value that a loop of the cell replaces",
        "loss = mib(500)",
        "x = mib(600)\nfor _ in range(2):\n    loss = x[:1]\n    loss.add_(1)",
        best="further",
    ),
    _plain("the cell before left it", "x = mib(400)", "y = mib(300); z = mib(400)", best="rerun"),
    _plain("left over and made anew", "old = mib(100)", "big = mib(500)\nbigger = mib(500)", best="never"),
    _plain("left over, and a name is in the way", "old = mib(300)", "big = mib(400)\nbigger = mib(300)", best="rerun"),
    _plain("a name read before it is bound", "x = mib(300)", "x = torch.cat([x, x, x])", best=None),
    _plain("an alias", "a = mib(500); b = a", "x = mib(600)", best="rerun"),
    _plain("a dict", "runs = {'a': mib(300), 'b': mib(300)}", "runs['c'] = mib(400)"),
    _plain("deleted and made again", "x = mib(600); z = mib(200)", "del x\nx = mib(600)\ny = mib(300)"),
    _plain(
        "shown and forgotten",
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.w = nn.Parameter(mib(500), False)",
        "M()",
        "x = mib(600)",
        best="rerun",
    ),
    # lists and loops
    _plain("can never fit", "old = mib(100)", "big = [mib(60) for _ in range(30)]", best=None, loop=2),
    _plain("one request that can never fit", "old = mib(100)", "x = mib(2000)", best="never"),
    _plain("a pile of an earlier cell", "pile = []; old = mib(300)", "for _ in range(9): pile.append(mib(100))", best=None),
    _plain(
        "a pile beside what is replaced",
        "pile = []; x = mib(300); z = mib(100)",
        "x = None\npile.append(mib(300))\ny = mib(600)",
    ),
    _plain(
        "a pile of the same size",
        "pile = []; x = mib(300); z = mib(100)",
        "x = 1\npile.append(mib(300))\ny = mib(650)",
        best=None,
    ),
    _plain("a loop that rebinds", "old = mib(300)", "for n in (100, 200, 300, 350):\n    x = mib(n)", best="rerun"),
    _plain("a loop with a list", "old = mib(500)", "xs = []\nfor _ in range(6): xs.append(mib(100))", best="rerun"),
    _plain("while", "old = mib(200)", "xs = []\nwhile len(xs) < 8: xs.append(mib(100))", best="further"),
    _plain(
        "run twice",
        "xs = [mib(100) for _ in range(4)]",
        "ys = [mib(100) for _ in range(3)]",
        "ys = [mib(100) for _ in range(5)]",
    ),
    _plain(
        "cycles",
        "class Node: pass\ndef ring(n):\n    a = Node(); a.self = a; a.x = mib(n); return a",
        "gc.disable()",
        "r = ring(400)",
        "r = None",
        "x = mib(600)",
        best="rerun",
    ),
    _plain(
        "cycles of the cell itself",
        "class Node: pass\ndef ring(n):\n    a = Node(); a.self = a; a.x = mib(n); return a",
        "gc.disable()",
        "for _ in range(4): r = ring(300)",
    ),
    # functions
    _plain(
        "a function",
        "old = mib(500)",
        "def step(batch):\n    hidden = mib(200)\n    return mib(200)",
        "y = step(mib(100))",
        best="rerun",
    ),
    _plain(
        "a function with a global",
        "bank = []; old = mib(200)",
        "def put(n): bank.append(mib(n)); return mib(n)",
        "y = [put(100) for _ in range(4)]",
    ),
    _plain("a function that reads a name", "old = mib(500)", "def use(): return old.numel() + mib(600).numel()", "use()"),
    _plain("a function that takes too much", "def step():\n    hidden = mib(500)\n    return mib(500)", "step()", best="never"),
    _plain(
        "a generator", "old = mib(400)", "def gen():\n    for _ in range(5): yield mib(150)", "xs = list(gen())", best="further"
    ),
    _plain("exec", "old = mib(500)", "exec('x = mib(600)')"),
    _plain("transient", "old = mib(300)", "t = mib(400); del t\nx = mib(350); y = mib(350)", best="rerun"),
    # the same cell has failed before, further on
    _plain("never, as it was before", "x = mib(300); y = mib(300); z = mib(600)", between=("old = mib(200)",), best="never"),
    _plain("further on before", "net = mib(100)", "x = mib(300); y = mib(300); z = mib(300)", between=("old = mib(200)",)),
    _plain("less than before", "n = 700", "x = mib(300); y = mib(n)", between=("n = 300; old = mib(400)",)),
    _plain(
        "less than before, in an object",
        "sizes = [300, 300, 600]",
        "xs = [mib(n) for n in sizes]",
        between=("sizes[2] = 100; old = mib(500)",),
        best="request",
    ),
    # exceptions
    _plain(
        "caught and raised again",
        "old = mib(500)",
        "try: x = mib(600)\nexcept torch.OutOfMemoryError as e: raise ValueError('no') from e",
        best="rerun",
    ),
    _plain(
        "caught twice",
        "old = mib(300)",
        "for n in (900, 800, 700):\n    try: x = mib(n)\n    except torch.OutOfMemoryError: pass\nx = mib(700)",
    ),
    _plain("nested", "old = mib(500)", "try: mib(800)\nexcept torch.OutOfMemoryError: y = mib(600)"),
    # fragmentation, settings, other devices and processes
    _plain("in pieces", "whole = mib(900); del whole", "xs = [mib(90) for _ in range(10)]; del xs[::2]", "y = mib(450)"),
    _plain(
        "in pieces, with a name",
        "whole = mib(900); del whole",
        "xs = [mib(45) for _ in range(20)]; del xs[::2]",
        "y = [mib(20) for _ in range(4)]; z = mib(450)",
    ),
    _plain(
        "small blocks",
        "xs = [mib(4) for _ in range(60)]; old = mib(400); del xs[::2]",
        "ys = [mib(9) for _ in range(20)]; y = mib(400)",
    ),
    _plain(
        "a hole of another size",
        "a, b = mib(100), mib(300); del a; old = mib(300)",
        "t = mib(250); del t\nx = mib(100); y = mib(400)",
    ),
    _plain(
        "a memory fraction",
        "torch.cuda.set_per_process_memory_fraction(0.5); net = mib(200)",
        "x = [mib(400), net]",
        best="rerun",
    ),
    _plain(
        "expandable segments",
        "old = mib(500)",
        "xs = [mib(70) for _ in range(8)]",
        settings={"conf": "expandable_segments:True"},
    ),
    _plain(
        "the second of two devices",
        "a, b = mib(700), mib(600, 'cuda:1')",
        "x = mib(700, 'cuda:1')",
        settings={"devices": 2},
        best="rerun",
    ),
    _plain("another process", "old = mib(100)", "x = mib(600)", others=500, best="rerun"),
    _plain("another process, and a name that is enough", "old = mib(300)", "x = mib(400)", others=300, best="rerun"),
    # fits
    _plain("a fit of a named learner", "learn = learner(24)", "old = mib(600)", "fit(learn)", fits=True),
    _plain("a fit that is too large", "learn = learner(64)", "fit(learn)", fits=True),
    _plain("a learner made in the cell", "old = mib(500)", "big = learner(32, weights=100)\nfit(big)", fits=True),
    _plain(
        "a fit before, and another learner",
        "learn = learner(8, weights=100)\nfit(learn)",
        "big = learner(32, weights=150)\nfit(big)",
        fits=True,
    ),
    _plain(
        "a fit that can never fit",
        "learn = learner(8, weights=50)\nfit(learn)",
        "big = learner(64, weights=60, width=5)\nfit(big)",
        fits=True,
    ),
    _plain(
        "workers",
        "dl = DataLoader([(torch.ones(4), torch.ones(4))] * 8, bs=4, num_workers=1)\nfor b in dl: pass\nold = mib(600)",
        "x = mib(700)",
        fits=True,
        best="rerun",
    ),
    _plain(
        "a loop over rates",
        "old = mib(300)",
        "for lr in (1, 2, 3, 4):\n    learn = learner(32, weights=40)\n    fit(learn)",
        fits=True,
    ),
)
