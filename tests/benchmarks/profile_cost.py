"""What `%%profile_fit` costs a cell in all: before, during and after its fits, with imports, the report and its display.

    python tests/benchmarks/profile_cost.py [--rounds 5] [--fits FOLDER] [--items] [NAME …]

Each fit runs as a cell of IPython in a fresh process, forked where torch and its library are imported (and then collected once,
so that no page of the parent is copied later), with `%%profile_fit` and without, in an order that alternates. nbguard's
bytecode is cached, as pip leaves it. Processor time of the process and its workers, so that others disturb little.
A round's pair gives what is added; the table has the medians, and the difference of the least times. Beside it stands what
the report says of its own cost, and the ratio of the two.

`--items` says where it goes, from one more run of each fit with clocks around the parts: modules that only the profile imports,
the start, each instrument's events, the thread that samples stacks, the end, the report, and what it takes to show it. The rest
is of the patched functions and of what others have to read again into the processor's caches.

`--fits FOLDER`: the fits of a folder's files, too: each has NAME, SETUP and CELL, code of two cells, and may have IMPORTS.
It never fails by time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import resource
import runpy
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = """
import warnings; warnings.filterwarnings("ignore")
import logging, math, os, random, time, numpy as np, torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1); torch.manual_seed(0); random.seed(0); np.random.seed(0)
"""


@dataclass(frozen=True)
class Fit:
    """A cell with a fit, the one before it, and the modules that a notebook has imported by then."""

    name: str
    setup: str
    cell: str
    imports: tuple[str, ...] = ()


LOOP = """
X, Y = torch.randn({items}, 64), torch.randint(0, 2, ({items},))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, 2))
opt, measure = torch.optim.Adam(model.parameters(), 1e-4), nn.CrossEntropyLoss()
"""
LOOPS = """
for epoch in range(5):
    for x, y in loader:
        loss = measure(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    print(epoch, loss.item())
"""
BY_HAND = """
A = torch.rand(500, 500); A = (A + A.T > 1.98).float() + torch.eye(500)
A, X, Y = A / A.sum(1, keepdim=True), torch.randn(500, 64), torch.randint(0, 7, (500,))
class Net(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 7)
    def forward(self, x): return A @ self.b(F.relu(A @ self.a(x)))
model = Net(); opt = torch.optim.Adam(model.parameters(), .01)
"""
BY_HANDS = """
for epoch in range({epochs}):
    opt.zero_grad(); loss = F.cross_entropy(model(X), Y); loss.backward(); opt.step()
    if epoch % 50 == 0:
        with torch.no_grad(): print(epoch, loss.item(), (model(X).argmax(1) == Y).float().mean().item())
"""
LEARNER = """
from fastai.basics import *
data = [(torch.randn(64), torch.tensor(at % 2)) for at in range({items})]
dls = DataLoaders.from_dsets(data, data[:320], bs=32, num_workers=0, device="cpu")
net = nn.Sequential(nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, 2))
learn = Learner(dls, net, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
"""
VISION = """
from fastai.vision.all import *
import tempfile
path = Path(tempfile.mkdtemp())
for c in ("cat", "dog"):
    (path/c).mkdir()
    for i in range({items}): Image.fromarray(np.random.randint(0, 255, (64, 64, 3), dtype=np.uint8)).save(path/c/f"{{i}}.png")
dls = ImageDataLoaders.from_folder(path, valid_pct=.2, seed=42, item_tfms=Resize(64), bs=16, num_workers=0)
learn = vision_learner(dls, resnet18, metrics=error_rate, pretrained=False)
"""
LIGHTNING = """
import lightning, tempfile
class Net(lightning.LightningModule):
    def __init__(self): super().__init__(); self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    def training_step(self, batch, at):
        loss = F.cross_entropy(self.layers(batch[0]), batch[1]); self.log("loss", loss)
        return loss
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(), 1e-3)
X, Y = torch.randn(9600, 64), torch.randint(0, 2, (9600,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=32)
plain = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
trainer, net = lightning.Trainer(max_epochs=2, default_root_dir=tempfile.mkdtemp(), **plain), Net()
"""
TRANSFORMERS = """
import tempfile, transformers
from transformers import Trainer, TrainingArguments, BertConfig, BertForSequenceClassification
transformers.logging.set_verbosity_error()
size = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, max_position_embeddings=32)
model = BertForSequenceClassification(BertConfig(vocab_size=300, **size))
class Reviews(torch.utils.data.Dataset):
    def __init__(self, n): self.x = torch.randint(0, 300, (n, 24)); self.y = torch.randint(0, 2, (n,))
    def __len__(self): return len(self.y)
    def __getitem__(self, i):
        return dict(input_ids=self.x[i], attention_mask=torch.ones(24, dtype=torch.long), labels=self.y[i])
options = dict(report_to=[], save_strategy="no", logging_steps=50, disable_tqdm=True, use_cpu=True)
args = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=2, **options)
trainer = Trainer(model=model, args=args, train_dataset=Reviews(960))
"""
FITS = (
    Fit("plain loop, 400 batches", LOOP.format(items=2560, width=64), LOOPS),
    Fit("plain loop, 1,500 batches", LOOP.format(items=9600, width=900), LOOPS),
    Fit("without a loader", BY_HAND, BY_HANDS.format(epochs=300)),
    Fit("without a loader, long", BY_HAND, BY_HANDS.format(epochs=4000)),
    Fit("fastai, 300 batches", LEARNER.format(items=3200, width=64), "learn.fit(3, 1e-4)", ("fastai.basics",)),
    Fit("fastai, 1,500 batches", LEARNER.format(items=16000, width=600), "learn.fit(3, 1e-4)", ("fastai.basics",)),
    Fit("fastai vision", VISION.format(items=40), "learn.fine_tune(1)", ("fastai.vision.all",)),
    Fit("fastai vision, long", VISION.format(items=100), "learn.fine_tune(2)", ("fastai.vision.all",)),
    Fit("Lightning", LIGHTNING, "trainer.fit(net, loader)", ("lightning",)),
    Fit("Transformers", TRANSFORMERS, "trainer.train()", ("transformers", "accelerate")),
)


def fits_of(folder: str) -> Iterator[Fit]:
    """Yield the fits of a folder's files, in the order of their names."""
    sys.path.insert(0, folder)
    for path in sorted(Path(folder).glob("[!_]*.py")):
        found = runpy.run_path(str(path))
        yield Fit(found["NAME"], found["SETUP"], found["CELL"], tuple(found.get("IMPORTS", ())))


def processor_time() -> float:
    """Return the seconds that this process and those it waited for have had."""
    return sum(sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


# --- The parts of a profile, each with a clock around it.


class Clocks:
    """Adds up the processor time of parts by their names; what is inside of another part counts only there."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self._inside: list[float] = []

    def around(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `act` and adds its time."""

        @functools.wraps(act)
        def timed(*args: Any, **kw: Any) -> Any:
            self._inside.append(0)
            start = time.thread_time()
            try:
                return act(*args, **kw)
            finally:
                took = time.thread_time() - start
                self.took[name] = self.took.get(name, 0) + took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return timed

    def put(self, owner: Any, name: str, label: str) -> None:
        setattr(owner, name, self.around(label, getattr(owner, name)))


class TimedSubscriber:
    """A subscriber of a recorder with a clock, and equal to the one without."""

    def __init__(self, act: Any, clocks: Clocks) -> None:
        self.act, self.__self__ = act, getattr(act, "__self__", act)
        self._timed = clocks.around(f"events: {type(self.__self__).__name__}", act)

    def __call__(self, *facts: Any) -> None:
        self._timed(*facts)

    def __eq__(self, other: object) -> bool:
        return bool(self.act == getattr(other, "act", other))

    def __hash__(self) -> int:
        return hash(self.act)


def put_clocks() -> Clocks:
    """Put clocks around the parts of a profile."""
    from nbguard.frontend.notebook import display
    from nbguard.frontend.notebook import profile as cell_profile
    from nbguard.training.profiler import profile as fit_profile
    from nbguard.training.profiler.instruments import instruments, stack_sampler
    from nbguard.training.profiler.record import recorder

    clocks = Clocks()
    subscribe = recorder.Recorder.subscribe

    def subscribes(self: Any, event: Any, act: Any, **kw: Any) -> None:
        subscribe(self, event, act if type(act) is TimedSubscriber else TimedSubscriber(act, clocks), **kw)

    recorder.Recorder.subscribe = subscribes  # type: ignore[method-assign]
    attempt = instruments.FitInstruments.attempt

    def attempts(self: Any, action: str, part: object, *arguments: object) -> Any:
        return clocks.around(f"{action}: {type(part).__name__}", attempt)(self, action, part, *arguments)

    instruments.FitInstruments.attempt = attempts  # type: ignore[method-assign]
    ask = instruments.FitInstruments._ask

    def asks(self: Any, part: Any, otherwise: Any) -> Any:
        return clocks.around(f"observe: {type(part).__name__}", ask)(self, part, otherwise)

    instruments.FitInstruments._ask = asks  # type: ignore[assignment]
    after = fit_profile.FitProfile._attempt

    def attempted(self: Any, what: str, act: Any, otherwise: Any) -> Any:
        return clocks.around(f"after: {what}", after)(self, what, act, otherwise)

    fit_profile.FitProfile._attempt = attempted  # type: ignore[method-assign]
    sampler, look = stack_sampler.StackSampler, stack_sampler.StackSampler._look

    def looks(self: Any) -> None:
        look(self)
        clocks.took["the sampling thread"] = time.thread_time()

    sampler._look = looks  # type: ignore[method-assign]
    clocks.put(fit_profile.FitProfile, "start", "start: the rest")
    clocks.put(fit_profile.FitProfile, "finish", "after: the rest")
    clocks.put(cell_profile, "show", "showing")
    clocks.put(display, "display_bundle", "showing")
    return clocks


# --- One run of a fit in a process of its own.


def run(fit: Fit, *, profiled: bool, modules: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return what a cell took, with the parts where the modules that a profile imports are given."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    if profiled:
        shell.run_line_magic("load_ext", "nbguard")
    with capture_output():
        for cell in (HEAD, fit.setup):
            shell.run_cell(cell, store_history=True).raise_error()
    found: dict[str, Any] = {}
    clocks = None
    gc.collect()
    if modules is not None:
        start = processor_time()
        for name in modules:
            with contextlib.suppress(ImportError):
                __import__(name)
        found["imports"] = processor_time() - start
        clocks = put_clocks()
    known = set(sys.modules)
    with capture_output() as output:
        start = processor_time()
        result = shell.run_cell(("%%profile_fit -o report\n" if profiled else "") + fit.cell, store_history=True)
        found["took"] = processor_time() - start
    found["failed"] = "" if result.error_in_exec is None else repr(result.error_in_exec)[:200]
    found["modules"] = [name for name in sys.modules if name not in known]
    report = shell.user_ns.get("report")
    if profiled:
        found["own"] = report.overhead.total / 1e9 if report is not None else output.stderr[-300:]
    if clocks is not None:
        found["parts"] = clocks.took
    return found


def forked(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "found.json")
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            try:
                place.write_text(json.dumps(act()))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(pid, 0)
        found: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {"failed": "the process ended"}
        return found


def middle(values: list[float]) -> float:
    return statistics.median(values)


def say(fit: Fit, rounds: int) -> tuple[str, ...]:
    """Print the row of a fit. Return the modules that only a profile imports."""
    forked(functools.partial(run, fit, profiled=True))  # what it imports is compiled then
    pairs = []
    for turn in range(rounds):
        order = (False, True) if turn % 2 else (True, False)
        found = {profiled: forked(functools.partial(run, fit, profiled=profiled)) for profiled in order}
        pairs.append((found[False], found[True]))
    for without, profiled in pairs:
        if without["failed"] or profiled["failed"]:
            print(f"{fit.name:28} not measured: {without['failed']} {profiled['failed']}", flush=True)
            return ()
    base, ours = ([pair[at]["took"] for pair in pairs] for at in (0, 1))
    added = [after - before for before, after in zip(base, ours, strict=True)]
    own = [pair[1]["own"] for pair in pairs if type(pair[1]["own"]) is float]
    says = middle(own) if own else 0.0
    apart = says / middle(added) if middle(added) > 0 else 0.0
    print(
        f"{fit.name:28} {middle(base):7.2f} {middle(added):+7.2f} {100 * middle(added) / middle(base):+6.1f} % "
        f"{min(ours) - min(base):+7.2f}   {says:7.2f}  × {apart:.2f}",
        flush=True,
    )
    usual = set(pairs[0][0]["modules"])
    return tuple(name for name in pairs[0][1]["modules"] if name not in usual)


def say_items(fit: Fit, modules: tuple[str, ...]) -> None:
    """Print where the time of a profile goes."""
    found = forked(functools.partial(run, fit, profiled=True, modules=modules))
    if found["failed"]:
        print(f"    {found['failed']}")
        return
    parts = {f"{len(modules)} modules imported": found["imports"], **found["parts"]}
    for name, took in sorted(parts.items(), key=lambda part: -part[1]):
        if took >= 0.0005:
            print(f"    {1e3 * took:7.1f} ms  {name}")
    print(f"    {1e3 * sum(parts.values()):7.1f} ms  of these together", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--fits", metavar="FOLDER", help="a folder of more fits")
    options.add_argument("--items", action="store_true")
    options.add_argument("names", nargs="*", metavar="NAME", help="the fits whose names contain one of these; all else")
    chosen = options.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MPLBACKEND="agg", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    import torch

    import nbguard  # noqa: F401 - once, before the forks

    torch.set_num_threads(1)
    fits = (*FITS, *(fits_of(chosen.fits) if chosen.fits else ()))
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {chosen.rounds} rounds, seconds of processor time")
    print(f"{'':28} {'without':>7} {'added':>7} {'':8} {'least':>7}   {'it says':>7}  of it")
    sys.dont_write_bytecode = False
    with tempfile.TemporaryDirectory() as folder:
        measure(fits, chosen, folder)


def measure(fits: tuple[Fit, ...], chosen: argparse.Namespace, folder: str) -> None:
    """Print the rows of the chosen fits; what they import besides is compiled into a folder."""
    for fit in fits:
        if chosen.names and not any(name in fit.name for name in chosen.names):
            continue
        sys.pycache_prefix = None
        try:
            for name in fit.imports:
                __import__(name)
        except ImportError as error:
            print(f"{fit.name:28} not measured: {error}")
            continue
        sys.pycache_prefix = folder
        modules = say(fit, chosen.rounds)
        if chosen.items:
            say_items(fit, modules)


if __name__ == "__main__":
    main()
