"""Random notebooks in which all is well: nobody is told anything, and a profile of their fits finds nothing above a note.

300 in a thorough run, else 6. By hand, others: NBGUARD_FUZZ_FROM=300 pytest tests/zoo/test_clean_notebooks.py.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.kernels import Zygote
from tests.thorough import THOROUGH

_FIRST = int(os.environ.get("NBGUARD_FUZZ_FROM", "0"))
_COUNT = int(os.environ.get("NBGUARD_FUZZ", "300" if THOROUGH else "6"))

PROGRAM = r'''
import contextlib, gc, io, json, random, tempfile, types, warnings
warnings.filterwarnings("ignore")
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
import nbguard
shell = InteractiveShell.instance(user_module=types.ModuleType("__main__"))
shell.history_manager.enabled = False
PRELUDE = """
import collections, contextlib, functools, gc, io, itertools, math, random, weakref
import numpy as np, torch
import torch.nn.functional as F
from fastai.basics import *
from copy import deepcopy
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
N = 1 << 19
def T(): return torch.randn(N)
def make(): return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 4))
xs, ys = torch.randn(512, 512), torch.randint(0, 4, (512,))
train_ds, valid_ds = TensorDataset(xs[:384], ys[:384]), TensorDataset(xs[384:], ys[384:])
train_dl, valid_dl = DataLoader(train_ds, 64, shuffle=True), DataLoader(valid_ds, 64)
net, opt, best, history = make(), None, math.inf, []
cache, queue, recent = {}, [], collections.deque(maxlen=3)
class Trainer:
    def __init__(self, net, lr=0.05):
        self.net, self.opt, self.log = net, torch.optim.SGD(net.parameters(), lr, momentum=0.9), []
    def step(self, x, y):
        self.opt.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        self.opt.step()
        return loss.detach()
    def fit(self, epochs):
        for _ in range(epochs):
            total = sum(self.step(x, y) for x, y in train_dl)
            self.log.append(float(total) / len(train_dl))
        return self
"""
# Cells in which nothing is left behind that nobody wants, parted by empty lines. {k} is a number of its own.
CELLS = [cell.strip() for cell in """
x = T(); print(x.mean().item())

x = T()
y = x * 2
y.sum()

x = T()
best_x = x

x = T(); x = x + 1; x += 1; x = F.relu(x)

x = T()
x.sum().item()

z{k} = T()
z{k}[:3].tolist()

z{k} = T()
del z{k}

z{k} = T()
z{k} = None

part{k} = T()[:8].clone()

net = make()
opt = torch.optim.Adam(net.parameters())

make()[1]

net = make()
opt = torch.optim.SGD(net.parameters(), 0.1)
frozen = nn.Sequential(*list(net)[:2]).requires_grad_(False)
head = net[2]

def epoch(net, opt):
    for x, y in train_dl:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward(); opt.step()
        history.append(loss.item())
opt = torch.optim.AdamW(net.parameters(), 1e-3)
epoch(net, opt)

with torch.no_grad():
    preds = torch.cat([net(x_) for x_, _ in valid_dl])
(preds.argmax(1) == ys[384:]).float().mean()

preds = []
with torch.inference_mode():
    for x_, _ in valid_dl: preds.append(net(x_).softmax(1))
preds = torch.cat(preds)

def evaluate(net):
    net.eval()
    with torch.no_grad():
        total = sum(F.cross_entropy(net(x), y, reduction='sum') for x, y in valid_dl)
    net.train()
    return total.item() / len(valid_ds)
evaluate(net)

trainer = Trainer(make()).fit(1)
trainer.log

trainers = [Trainer(make(), lr).fit(1) for lr in (0.1, 0.01)]
best_trainer = min(trainers, key=lambda one: one.log[-1])

for lr in (0.1, 0.01):
    trial = Trainer(make(), lr).fit(1)
    print(lr, trial.log[-1])

state = deepcopy(net.state_dict())
net.load_state_dict(state)

state = {name: value.clone() for name, value in net.state_dict().items()}

buffer = io.BytesIO()
torch.save(net.state_dict(), buffer)
buffer.seek(0)
net.load_state_dict(torch.load(buffer))

ema = deepcopy(net).requires_grad_(False)
with torch.no_grad():
    for a, b in zip(ema.parameters(), net.parameters()): a.lerp_(b, 0.1)

cache['a'] = T()
cache['b'] = T()
cache.pop('a').sum().item()

cache.clear()

queue = [T(), T()]
total = sum(one.sum().item() for one in queue)

queue.clear()

queue = [one for one in queue if one.mean() > 0]

recent.append(T()); recent.append(T())

try:
    big = T()
    raise ValueError('expected')
except ValueError as error:
    print(error)

with contextlib.suppress(KeyError):
    held = T(); cache['missing']

def local():
    inner = T()
    return inner.sum().item()
local()

def numbers():
    for _ in range(3): yield T().mean().item()
list(numbers())

stream = (T().mean() for _ in range(2))
for one in stream: print(float(one))

batches = iter(train_dl)
x_, y_ = next(batches)
del batches

for x_, y_ in train_dl:
    break

@functools.lru_cache
def table{k}(n): return torch.ones(n)
table{k}(N).sum().item()

def scaler(by): return lambda value: value * by
double = scaler(2)
x = double(T())

get = (lambda kept: lambda at: kept[at].item())(T())
get(0)

handle = net[0].register_forward_hook(lambda module, args, output: history.append(output.mean().item()))
net(xs[:8]).sum().item()
handle.remove()

activations = {}
handle = net[1].register_forward_hook(lambda module, args, output: activations.update(relu=output.detach()))
net(xs[:8]); handle.remove()

w = torch.randn(N, requires_grad=True)
(w ** 2).mean().backward()
w.grad.norm()

w = torch.randn(1 << 10, requires_grad=True)
for _ in range(5):
    loss = ((w @ w) - 1) ** 2
    g, = torch.autograd.grad(loss, w)
    with torch.no_grad(): w -= 0.01 * g

noise = T().requires_grad_()
adversarial = (noise + noise.sign()).detach()

a = np.ones(N, np.float32)
t = torch.from_numpy(a)
b = (t * 2).numpy()

pairs = list(zip(torch.split(xs, 64), torch.split(ys, 64)))
len(pairs)

seen = weakref.WeakValueDictionary()
z{k} = T(); seen['z'] = z{k}
del z{k}

Sample = collections.namedtuple('Sample', 'x y')
sample = Sample(T(), 1)

x, y = T(), T()
x, y = y, x

first, *rest = T(), T(), T()
rest = rest[:1]

with torch.autocast('cpu', torch.bfloat16):
    out = net(xs[:64])
out = out.float().detach()

rows = [dict(step=i, loss=float(T().mean())) for i in range(3)]
rows

class Ds{k}(Dataset):
    def __init__(self): self.data = T().view(-1, 512)
    def __len__(self): return len(self.data)
    def __getitem__(self, i): return self.data[i]
ds{k} = Ds{k}()
next(iter(DataLoader(ds{k}, 32))).shape

learn = Learner(DataLoaders(train_dl, valid_dl), make(), loss_func=F.cross_entropy, metrics=accuracy)
with learn.no_logging(), learn.no_bar(): learn.fit(1, 0.01)

with learn.no_logging(), learn.no_bar(): learn.validate()

with learn.no_bar(): outputs, targets = learn.get_preds()
(outputs.argmax(1) == targets).float().mean()

undefined_name

net(xs[:8]).sum().item() + missing

%gpumem

%reset_gpu --dry-run

%time T().sum().item()

%timeit -n1 -r2 T().sum()
""".split("\n\n")]
# Fits in which nothing is wrong; each is profiled. Their time is that of their own computation.
FITS = [
    "trainer = Trainer(make()).fit(6)",
    "with learn.no_logging(), learn.no_bar(): learn.fit(3, 0.01)",
    """
model_1 = make(); optimizer_1 = torch.optim.SGD(model_1.parameters(), 0.05); means = []
for epoch in range(4):
    running_1 = 0.0
    for x_, y_ in train_dl:
        optimizer_1.zero_grad(set_to_none=True)
        loss_1 = F.cross_entropy(model_1(x_), y_)
        loss_1.backward()
        torch.nn.utils.clip_grad_norm_(model_1.parameters(), 5.0)
        optimizer_1.step()
        running_1 += loss_1.detach()
    means.append(float(running_1) / len(train_dl))
""",
    """
model_2 = make(); optimizer_2 = torch.optim.AdamW(model_2.parameters(), 1e-3)
schedule_2 = torch.optim.lr_scheduler.OneCycleLR(optimizer_2, 1e-2, total_steps=5 * len(train_dl))
for epoch in range(5):
    model_2.train()
    for x_, y_ in train_dl:
        loss_2 = F.cross_entropy(model_2(x_), y_)
        loss_2.backward()
        optimizer_2.step(); schedule_2.step(); optimizer_2.zero_grad()
    model_2.eval()
    with torch.no_grad():
        right = sum((model_2(x_).argmax(1) == y_).sum() for x_, y_ in valid_dl)
    history.append(int(right) / len(valid_ds))
""",
    """
coder_3 = nn.Sequential(nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 512))
optimizer_3 = torch.optim.Adam(coder_3.parameters(), 1e-3)
for epoch in range(5):
    for number, (x_, _) in enumerate(train_dl):
        (F.mse_loss(coder_3(x_), x_) / 2).backward()
        if number % 2:
            optimizer_3.step(); optimizer_3.zero_grad()
""",
]

def run(source):
    """Run a cell; what it prints says nothing of nbguard, unless the cell asks for it."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        result = shell.run_cell(source, store_history=True)
    assert result.error_before_exec is None, source
    assert result.error_in_exec is None or isinstance(result.error_in_exec, NameError), (source, result.error_in_exec)
    assert source[:1] == "%" or "nbguard" not in out.getvalue(), (source, out.getvalue())
    assert not nbguard.notices(), (source, nbguard.notices())

def play(seed):
    dice = random.Random(seed)
    run("learn = None")
    for k in range(14):
        source = dice.choice(CELLS).replace("{k}", f"{seed}_{k}")
        if "learn." in source and shell.user_ns["learn"] is None:
            continue
        run(source)
        if dice.random() < 0.25:
            run(source)  # somebody runs the cell again
    for fit in dice.sample(FITS, 2):
        if "learn." in fit and shell.user_ns["learn"] is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "report.json")
            run(f"%%profile_fit --json {file}\n{fit}")
            report = json.loads(file.read_text())
        above = [finding for finding in report["findings"] if finding["severity"] != "note"]
        assert not above, (fit, above)
        assert report["timing"]["batches"], fit

run(PRELUDE); run("%load_ext nbguard")
run(FITS[0])
gc.collect(); gc.freeze()
failed = {}
for seed in SEEDS:
    try:
        play(seed)
    except AssertionError as error:
        failed[seed] = str(error)[:1500]
        if nbguard.notices():
            break  # it would be told of the next ones, too
        nbguard.notices()
        run("%nbguard notices --clear") if False else None
print("RESULT" + json.dumps(failed))
'''


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_nothing_is_said_of_notebooks_in_which_all_is_well(fastai_zygote: Zygote) -> None:
    out, errors = fastai_zygote.run(f"SEEDS = range({_FIRST}, {_FIRST + _COUNT})\n{PROGRAM}", {}, 60 + 10 * _COUNT)
    _, mark, result = out.rpartition("RESULT")

    assert mark, errors[-3000:] + out[-1000:]
    failed = json.loads(result)
    assert not failed, "\n".join(f"{seed}: {text}" for seed, text in failed.items())
