"""Memory of fits on a device that counts: the allocator's own figures to the byte, and nothing done to it by reading them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nbguard.training.profiler.analysis.time import phase_log
from nbguard.units import MiB
from tests.cuda.conftest import KEPT_WORKSPACES

pytestmark = pytest.mark.fakecuda

_PRELUDE = """
import dataclasses, json, torch
from torch import nn
from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler.analysis.memory_growth import memory_report
from nbguard.training.profiler.instruments.timeline import MemoryWatch
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop

WIDTH, BATCH = 512, 128

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    def forward(self, x):
        torch.empty(32 << 20, dtype=torch.uint8, device=x.device)  # gone before the forward pass ends
        return self.head(self.body(x).relu())

def train(count=30, keep=lambda x: None, device='cuda', make=torch.optim.Adam):
    net = Net().to(device)
    optimizer, criterion = make(net.parameters()), nn.MSELoss()
    data = torch.utils.data.TensorDataset(torch.randn(count * BATCH, WIDTH), torch.randn(count * BATCH, 1))
    for x, y in torch.utils.data.DataLoader(data, batch_size=BATCH):
        x, y = x.to(device), y.to(device)
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep(x)

def watch(fit, **settings):
    recorder = Recorder()
    loop, part = TorchLoop(recorder), MemoryWatch(**settings)
    loop.start()
    part.start(recorder)
    try:
        fit()
    finally:
        part.stop()
        loop.stop()
        recorder.stop()
    assert not recorder.failed, recorder.failed
    found = part.observe()
    return found if isinstance(found, Unavailable) else memory_report(found)

def show(report, **more):
    print(json.dumps(dataclasses.asdict(report) | more))
"""

INPUT = 128 * 512 * 4
PARAMETERS = 512 * 512 * 4 + 2 * 512 * 4 + 512  # in blocks of 512 bytes

Run = Callable[..., str]


@pytest.fixture
def report(fake_cuda_run: Run) -> Callable[..., dict[str, Any]]:
    """`report(code, **settings)` runs code after the prelude on the fake device and returns what it `show`s."""

    def run(code: str, **settings: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(fake_cuda_run(_PRELUDE + code, **settings).splitlines()[-1])
        return found

    return run


def _named(found: dict[str, Any]) -> dict[str, int]:
    assert sum(each["nbytes"] for each in found["categories"]) == found["peak"]
    return {each["name"]: each["nbytes"] for each in found["categories"]}


_AGAIN = """
held = torch.empty(10 << 20, dtype=torch.uint8, device='cuda')
net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())

def fit(count=8):
    for _ in range(count):
        work = torch.empty(160 << 20, dtype=torch.uint8, device='cuda')
        x = torch.ones(BATCH, WIDTH, device='cuda')
        optimizer.zero_grad(set_to_none=SET)
        net(x).square().mean().backward()
        optimizer.step()
        del work

fit()
workspaces = torch.cuda.memory_allocated() - (10 << 20) - 4 * PARAMETERS
report = watch(fit, deep=DEEP)
show(report, expected=workspaces)
"""


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_what_an_earlier_fit_has_left_counts_once(report: Callable[..., dict[str, Any]], to_none: bool, deep: bool) -> None:
    """The second fit finds parameters, gradients and state there: these are not "before the fit", too (seeds3.md W6)."""
    code = _AGAIN.replace("SET", str(to_none)).replace("DEEP", str(deep))
    named = _named(found := report(f"PARAMETERS = {PARAMETERS}\n{code}"))

    assert named["other" if "other" in named else "temporaries"] in range(160 * MiB, 161 * MiB)
    assert named["before the fit"] == 10 * MiB + found["expected"]
    assert (named["parameters"], named["optimizer state"]) == (PARAMETERS, 2 * PARAMETERS)


def test_figures_are_the_allocators_own(report: Callable[..., dict[str, Any]]) -> None:
    found = report(
        """
torch.cuda.set_per_process_memory_fraction(0.5)
held = torch.empty(10 << 20, dtype=torch.uint8, device='cuda')
start = torch.cuda.memory_allocated()
report = watch(train)
cuda = torch.cuda
show(report, expected=[start, cuda.max_memory_allocated(), cuda.max_memory_reserved(), cuda.memory_allocated()])
"""
    )

    assert (found["device"], found["source"], found["capacity"]) == ("cuda:0", "torch.cuda", 4096 * MiB)
    assert [found[name] for name in ("start", "peak", "peak_reserved", "end")] == found["expected"]
    named = _named(found)
    assert named["parameters"] == PARAMETERS
    assert named["optimizer state"] == 2 * PARAMETERS
    assert named["inputs"] == INPUT
    assert named["before the fit"] == 10 * MiB
    assert found["growth"] is None
    assert found["peak_phase"] == phase_log.FORWARD
    assert [each["phase"] for each in found["phases"] if each["is_exact"]] == [phase_log.FORWARD]


def test_a_peak_that_was_higher_before_the_fit_is_not_taken_for_its_own(report: Callable[..., dict[str, Any]]) -> None:
    found = report("torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); show(watch(train))")

    assert found["peak"] < 100 * MiB
    assert "1 GiB was allocated at once before" in found["notes"][0]
    assert not any(each["is_exact"] for each in found["phases"])


def test_a_leak_is_found_to_the_byte_with_its_holder(report: Callable[..., dict[str, Any]]) -> None:
    found = report(
        """
def run():
    kept = []
    train(60, kept.append)
show(watch(run))
"""
    )["growth"]

    assert found["per_batch"] == INPUT
    assert found["holder"] == "running run() → kept"


def test_two_recorded_batches_reach_the_counted_peak_and_leave_no_history(report: Callable[..., dict[str, Any]]) -> None:
    found = report(
        """
report = watch(train, deep=True)
show(report, counted=torch.cuda.max_memory_allocated(), history=torch._C._cuda_isHistoryEnabled())
""",
        **KEPT_WORKSPACES,
    )

    by_phase = {each["phase"]: each for each in found["phases"]}
    assert found["peak"] == found["counted"] == by_phase[phase_log.FORWARD]["peak"]
    assert all(each["is_exact"] for each in found["phases"])
    assert by_phase[phase_log.BACKWARD]["peak"] < found["peak"] - 30 * MiB
    assert _named(found)["temporaries"] == 32 * MiB
    assert (found["stacks"][0]["nbytes"], found["stacks"][0]["category"]) == (32 * MiB, "temporaries")
    assert found["stacks"][0]["site"].endswith("in forward()")
    assert not found["history"]


def test_a_history_that_somebody_else_records_is_left_alone(report: Callable[..., dict[str, Any]]) -> None:
    found = report(
        """
torch.ones(1, device='cuda')
torch.cuda.memory._record_memory_history(max_entries=1000)
report = watch(train, deep=True)
show(report, history=torch._C._cuda_isHistoryEnabled(), entries=len(torch.cuda.memory._snapshot()['device_traces'][0]))
"""
    )

    assert "left alone" in found["notes"][0]
    assert (found["history"], found["entries"]) == (True, 1000)


def test_reading_opens_no_context_and_changes_no_counter(fake_cuda_run: Run) -> None:
    code = """
on_cpu = watch(lambda: train(device='cpu', make=torch.optim.SGD))  # Adam itself would open the device
print(on_cpu.source, torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))
def counters(fit):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    fit()
    return torch.cuda.memory_stats()
torch.ones(1, device='cuda')
counters(train)
print(counters(train) == counters(lambda: watch(train)))
"""

    assert fake_cuda_run(_PRELUDE + code).splitlines()[-2:] == ["heap of the process False False", "True"]


def test_what_a_fit_on_the_cpu_keeps_is_named_where_there_is_a_gpu(fake_cuda_run: Run) -> None:
    code = """
import nbguard
kept = []
with nbguard.profile_fit(show=False) as profile:
    train(100, lambda x: kept.append(x * torch.ones(1, requires_grad=True)), device='cpu', make=torch.optim.SGD)
print(profile.report.first[0])
"""

    assert "`kept` keeps" in fake_cuda_run(_PRELUDE + code)


def test_running_out_of_memory_still_makes_a_report(report: Callable[..., dict[str, Any]]) -> None:
    found = report(
        """
part = []
class Watch(MemoryWatch):
    def stop(self):
        super().stop()
        part.append(memory_report(self.observe()))
MemoryWatch = Watch
kept = []
try:
    watch(lambda: train(60, lambda x: kept.append(torch.empty(100 << 20, dtype=torch.uint8, device='cuda'))))
except torch.OutOfMemoryError:
    show(part[0])
""",
        bytes=1 << 30,
        context=0,
    )

    assert found["peak"] > 800 * MiB
    assert found["peak"] <= found["capacity"] == 1024 * MiB
    assert _named(found)["parameters"] == PARAMETERS


_LOOPS = """
import json, torch, nbguard
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
device, rows = torch.device("cuda"), torch.ones(4096, 512)
loader = DataLoader(TensorDataset(rows, rows), 1024)
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]).to(device)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def train(line="loss.backward()"):
    code = compile(line, "<line>", "exec")
    for epoch in range(2):
        for x, y in loader:
            loss = functional.mse_loss(model(x.to(device)), y.to(device))
            exec(code, {"loss": loss})
            optimizer.step()
            optimizer.zero_grad()
def evaluate():
    total = 0.0
    for x, y in loader:
        total += functional.mse_loss(model(x.to(device)), y.to(device)).item()
def peak(run, *args):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*args)
    return torch.cuda.max_memory_allocated() - before
train()
with nbguard.profile_fit(show=False) as profile:
    train("loss.backward(retain_graph=True)")
    evaluate()
found = {finding.kind: finding for finding in profile.report.findings}
kept, unused = found["retain_graph"], found["no_grad"]
peaks = [peak(train, "loss.backward(retain_graph=True)"), peak(train, kept.change.strip("`"))]
peaks.append(peak(evaluate))
exec(unused.change.split("`")[1] + "\\n    peaks.append(peak(evaluate))")
print(json.dumps([kept.nbytes, unused.nbytes, peaks]))
"""


def test_graphs_that_are_kept_or_recorded_for_nothing_cost_what_is_said(fake_cuda_run: Run) -> None:
    """With the line that is printed for each, the peak falls by the bytes that are said."""
    kept, unused, (retained, let_go, recorded, without) = json.loads(fake_cuda_run(_LOOPS, **KEPT_WORKSPACES).splitlines()[-1])

    activations = 8 * 1024 * 512 * 4  # of each ReLU
    assert activations <= kept <= 1.4 * activations, "with the batch and the result"
    assert retained - let_go >= 0.9 * kept
    assert activations <= unused <= 1.1 * activations
    assert recorded - without >= 0.95 * unused


_PASSING = """
import json, torch, nbguard
from torch import nn
from torch.nn import functional
model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
x, classes = torch.ones(1024, 512, device="cuda"), torch.zeros(1024, dtype=torch.long, device="cuda")
large = 16 * 2**20
def train(weight):
    for _ in range(8):
        shares = model(x).softmax(1)  # named, and saved for the backward pass
        loss = functional.nll_loss(shares.log(), classes) + 0 * weight()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
def at_once():
    together = torch.stack([torch.ones(large, device="cuda") for _ in range(4)])
    return together.sum()
def by_name():
    global named
    named = torch.empty(4 * large, device="cuda")  # until the next batch
    return 1.0
found = []
for weight in (at_once, by_name, lambda: 1.0):
    named = None
    with nbguard.profile_fit(show=False, memory=True) as profile:
        train(weight)
    found.append([[each.what, each.nbytes, each.evidence] for each in profile.report.findings if each.kind == "temporaries"])
    torch.cuda.reset_peak_memory_stats()
print(json.dumps(found))
"""


def test_large_temporary_tensors_of_each_batch_are_named_by_their_line(fake_cuda_run: Run) -> None:
    """What a loss keeps for its backward pass, and what the model and the optimizer take, is none."""
    found, by_name, without = json.loads(fake_cuda_run(_PASSING).splitlines()[-1])

    [(words, nbytes, evidence)] = found
    assert "in at_once()" in words + evidence
    if sys.version_info >= (3, 12):  # a comprehension is a part of its function, so that one line makes all five
        assert nbytes == 2 * 4 * 4 * 16 * MiB
    else:
        assert nbytes == 4 * 4 * 16 * MiB, "the four, or the one that torch.stack makes of them; the other is named besides"
        assert "256 MiB at " in evidence
    [(words, nbytes, _)] = by_name
    assert (nbytes, "in by_name()" in words) == (2 * 4 * 4 * 16 * MiB, True), "the one before lives until the name has the next"
    assert without == []
