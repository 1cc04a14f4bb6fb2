"""The GPU's share of a profile on the fake device: nothing waits for it, nothing breaks. Its times mean nothing there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., str]

FIT = """
import json, sys, torch
from torch import nn
from nbguard.training.profiler.analysis.time.gpu import gpu_facts
from nbguard.training.profiler.instruments.instruments import GpuWatch
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop
waits = []
def counted(owner, name):
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: (waits.append(name), original(*a, **k))[1])
counted(torch.cuda, "synchronize")
for cls in (torch.cuda.Event, torch.cuda.Stream):
    counted(cls, "synchronize")
    if hasattr(cls, "wait"):
        counted(cls, "wait")
record = torch.cuda.Event.record
def recorded(event, *args):
    if torch.cuda.is_current_stream_capturing():
        waits.append("recorded into a graph")
    return record(event, *args)
torch.cuda.Event.record = recorded
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
device = WHERE
net.to(device)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(BATCHES, 8, device=DATA)), batch_size=1)
recorder = Recorder()
loop, watch = TorchLoop(recorder), GpuWatch()
watch.start(recorder); loop.start()
opt = torch.optim.SGD(net.parameters(), 0.1)
before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
for x, in loader:
    if device == "cuda":
        x = x.cuda()
    opt.zero_grad(); net(x).sum().backward(); opt.step()
started = recorder.clock()
loop.stop(); watch.stop(); marks = recorder.stop()
seen = watch.observe()
facts = gpu_facts(seen.marks, seen.used, seen.why_not)
print(json.dumps(dict(
    marks=len(watch._marks), phases=dict(facts.phases), busy=facts.busy, used=facts.used, note=facts.note, waits=waits,
    took=(recorder.clock() - started) / 1e9, failed=recorder.failed, initialised=torch.cuda.is_initialized(),
    batches=sorted({mark.batch for mark in watch._marks}),
)))
"""


def fit(
    run: Run, where: str = "cuda", batches: int = 12, data: str = "cpu", code: str = FIT, **settings: object
) -> dict[str, Any]:
    for name, value in {"WHERE": where, "BATCHES": batches, "DATA": data}.items():
        code = code.replace(name, repr(value))
    found: dict[str, Any] = json.loads(run(code, **settings))
    return found


@pytest.mark.fakecuda
def test_events_are_read_and_nothing_waits(fake_cuda_run: Run) -> None:
    found = fit(fake_cuda_run)
    assert found["failed"] == []
    assert found["waits"] == []
    assert found["batches"] == [*range(2, 13)]
    assert found["busy"] is not None
    assert set(found["phases"]) <= {
        "wait for data",
        "to device",
        "forward",
        "backward",
        "optimizer step",
        "zero_grad",
        "other code",
    }
    assert found["used"] == 0.07  # as the fake driver says
    assert "the driver says 7% on average" in found["note"]


@pytest.mark.fakecuda
def test_a_gpu_that_does_not_come_to_its_events_is_left_after_a_second(fake_cuda_run: Run) -> None:
    found = fit(fake_cuda_run, data="cuda", events="manual")  # a copy from the host would wait for all of them
    assert found["failed"] == []
    assert found["waits"] == []
    assert (found["marks"], found["busy"]) == (0, None)
    assert found["note"] == "too few batches were followed on the GPU"
    assert 1 <= found["took"] < 20


@pytest.mark.fakecuda
def test_later_on_the_batches_that_are_looked_at_are_followed(fake_cuda_run: Run) -> None:
    found = fit(fake_cuda_run, batches=70)
    assert found["batches"] == [*range(2, 33), 39, 52, 65]


@pytest.mark.fakecuda
def test_batches_that_no_loader_gives_are_followed(fake_cuda_run: Run) -> None:
    code = FIT.replace("for x, in loader:", "for _ in range(BATCHES):\n    x = torch.zeros(1, 8)")
    found = fit(fake_cuda_run, batches=70, code=code)
    assert found["failed"] == []
    assert found["batches"] == [0, *range(2, 33), 39, 52, 65]
    assert found["busy"] is not None


@pytest.mark.fakecuda
def test_a_recording_of_a_graph_is_not_disturbed(fake_cuda_run: Run) -> None:
    code = FIT.replace(
        "for x, in loader:",
        """
graphs = []
for x, in loader:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        net(torch.empty(1, 8, device="cuda"))
    graphs.append(graph)
    assert not torch.cuda.is_current_stream_capturing()
for x, in loader:""",
    )
    found = fit(fake_cuda_run, batches=4, code=code)
    assert found["failed"] == []
    assert "recorded into a graph" not in found["waits"]  # torch's own capture synchronizes
    assert found["marks"]


@pytest.mark.fakecuda
def test_a_step_that_is_recorded_after_others_is_not_disturbed(fake_cuda_run: Run) -> None:
    """CUDA refuses a question for an event while a graph is recorded, and the recording fails of it."""
    code = FIT.replace(
        "for x, in loader:",
        """
static = torch.zeros(1, 8, device="cuda")
for _ in range(3):
    opt.zero_grad(); net(static).sum().backward(); opt.step()
graph = torch.cuda.CUDAGraph()
opt.zero_grad()
with torch.cuda.graph(graph):
    net(static).sum().backward(); opt.step()
for x, in loader:""",
    )
    found = fit(fake_cuda_run, batches=4, code=code)
    assert found["failed"] == []
    assert "recorded into a graph" not in found["waits"]


@pytest.mark.fakecuda
def test_a_driver_that_does_not_say_is_no_trouble(fake_cuda_run: Run) -> None:
    found = fit(fake_cuda_run, mig=1)  # of a slice of a GPU it knows no utilisation
    assert (found["failed"], found["used"]) == ([], None)
    assert found["busy"] is not None


AUTOCAST = """
import json, torch
from torch import nn
from nbguard.frontend.notebook.profile import profile_fit
with profile_fit(show=False) as profile:  # before anything has used the GPU
    net = nn.Linear(8, 1).cuda()
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(6):
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(torch.zeros(4, 8, device="cuda")).float().mean()
        loss.backward(); opt.step(); opt.zero_grad()
from nbguard.frontend.notebook.predictions import measured_fit
measured = measured_fit(profile.report)
print(json.dumps([
    profile.observations.checks["amp"].in_dtype("bfloat16"), [each.name for each in profile.report.remedies],
    measured.precision, measured.gpu == torch.cuda.get_device_name(),
]))
"""


@pytest.mark.fakecuda
def test_autocast_is_seen_where_the_fit_is_the_first_to_use_the_gpu(fake_cuda_run: Run) -> None:
    assert json.loads(fake_cuda_run(AUTOCAST)) == [6, [], "half precision", True]
