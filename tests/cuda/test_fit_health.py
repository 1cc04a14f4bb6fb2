"""The health of a fit on the fake CUDA device: values are read late, nothing waits, and what waits is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_PRELUDE = """
import math, torch
from torch import nn
from tests.profiler.recording import recording
from nbguard.training.profiler.checks.amp import AmpWatch
from nbguard.training.profiler.nonfinite.nonfinite import FiniteWatch
from nbguard.training.profiler.checks.optimizers import OptimizerWatch
from nbguard.training.profiler.checks.syncs import SyncWatch
from nbguard.errors import StoppedAtNaN
fake = __import__("ctypes").CDLL("libcuda.so.1")
model = nn.Linear(4, 1).cuda()
x = torch.ones(2, 4).cuda()
losses = {loss: torch.tensor(loss).cuda().requires_grad_() for loss in (1.0, 2.0, 3.0, 4.0, math.nan, math.inf)}
def batch(loss):  # kernels compute nothing: the loss comes from the host. No copy in here, as that would wait
    model(x)
    losses[loss].backward()
"""


def test_a_loss_is_read_once_it_has_arrived_and_nobody_waits(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
watch = FiniteWatch()
with recording(watch):
    for loss in (1.0, 2.0, math.nan, 3.0):
        batch(loss)
        assert watch.observe().losses == 0
    fake.fake_cuda_complete_events()
    batch(4.0)
    found = watch.observe()
    assert found.losses == 4, found
    assert (found.first.value, found.first.place.batch, found.first.origin.kind) == ("NaN", 3, "unknown"), found
""",
        events="manual",
    )


def test_stop_on_nan_reads_every_batch_and_stops_there(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
watch = FiniteWatch(stop_on_nan=True)
try:
    with recording(watch):
        for loss in (1.0, math.inf, 3.0):
            batch(loss)
except StoppedAtNaN as error:
    assert "the loss is infinite in backward pass 2" in str(error), error
else:
    raise AssertionError("not stopped")
assert watch.observe().losses == 2
"""
    )


def test_reads_of_a_device_are_timed_and_those_of_the_host_do_not_count(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
from nbguard.training.profiler.checks.syncs import sync_findings
watch = SyncWatch()
with recording(watch):
    for loss in (1.0, 2.0, 3.0, 4.0):
        batch(loss)
        exec(compile("torch.ones(1).cuda().item()", "train.py", "exec"))
        exec(compile("torch.ones(1).item()", "host.py", "exec"))
        exec(compile("torch.cuda.synchronize()", "waits.py", "exec"))
        exec(compile("torch.ones(1, device='cuda').to('cpu').numpy()", "comes.py", "exec"))
        exec(compile("torch.ones(1).to('cuda').to(torch.float64).to('cpu', non_blocking=True)", "goes.py", "exec"))
sites = {site.where: site for site in watch.observe().sites}
assert sorted(sites) == ["comes.py:1", "train.py:1", "waits.py:1"], sites
assert all(site.calls == site.batches == 4 and site.waited > 0 for site in sites.values()), sites
found = sync_findings(watch.observe(), step=1)
assert [each.severity for each in found] == ["advice"] * 3 and found[0].time > 0, found
assert [each.severity for each in sync_findings(watch.observe(), step=10**12)] == ["note"] * 3
"""
    )


def test_gradients_and_scales_are_read_late_too(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
parts = finite, amp, optimizers = FiniteWatch(), AmpWatch(), OptimizerWatch()
scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=8.0), torch.optim.SGD(model.parameters(), 0.0)
with recording(*parts):
    for _ in range(4):
        loss = model(torch.ones(2, 4).cuda()).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert finite.observe().gradients == 0 or finite.observe().first is None
        optimizer.zero_grad()
(scaler,) = amp.observe().scalers
assert scaler.updates == 4, scaler
(one,) = optimizers.observe().optimizers
assert (one.steps + one.thrown, one.cleared) == (4, 4), one  # no kernel runs here: the scaler reads any value, and may skip
"""
    )


def test_fastais_mixed_precision_is_followed(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
from fastai.vision.all import DataLoader, DataLoaders, Learner, MixedPrecision
items = DataLoader([(torch.ones(4), torch.ones(1))] * 32, bs=4, device="cuda")
learn = Learner(DataLoaders(items, items, device="cuda"), nn.Linear(4, 1), loss_func=nn.MSELoss(), cbs=MixedPrecision())
parts = finite, amp, syncs = FiniteWatch(), AmpWatch(), SyncWatch()
with recording(*parts), learn.no_bar(), learn.no_logging():
    learn.fit(2)
facts = amp.observe()
assert facts.batches == (("float16", 16),), facts
assert [(s.updates, s.initial, s.is_static) for s in facts.scalers] == [(16, 65536.0, False)], facts
assert finite.observe().gradients == 0  # the scaler sees to those
found = {site.own: site.batches for site in syncs.observe().sites}
assert found == {"Recorder": 16, "GradScaler": 16}, syncs.observe()
"""
    )


_FIT = """
import torch
from torch import nn
import nbguard
def fit(rows, step):
    model = nn.Linear(rows.shape[1], 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    with nbguard.profile_fit(show=False) as profile:
        for (x,) in loader:
            model(step(x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile.report.first
"""


@pytest.mark.whole_heap  # with all imports made before, the copy is the second thing said
def test_batches_from_memory_that_is_not_page_locked_are_the_first_thing_said(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _FIT
        + """
rows = torch.zeros(1, 2**19).expand(160, -1)
first = [said for said in fit(rows, lambda x: x.cuda()) if "its steps change no value" not in said]  # as no kernel runs here
assert first[0].startswith("batches are copied from memory that is not page-locked: `pin_memory=True`"), first
"""
    )


def test_a_tensor_that_is_copied_to_the_device_anew_in_every_batch_is_named_by_its_line(
    fake_cuda_run: Callable[..., str],
) -> None:
    fake_cuda_run(
        _FIT
        + """
mask = torch.ones(4, 2**20)
fresh = compile("x.cuda()", "fresh.py", "eval")
same = compile("x.cuda() * mask.to('cuda').sum()", "same.py", "eval")
first = fit(torch.zeros(160, 64), lambda x: eval(same, globals(), {"x": x}))
assert any(said.startswith("same.py:1 copies the same tensor to the GPU in every batch: copy it once") for said in first), first
assert not any("page-locked" in said for said in first), first  # it is no batch that takes long to copy
first = fit(torch.zeros(160, 64), lambda x: eval(fresh, globals(), {"x": x}))
assert not any("copies the same tensor" in said for said in first), first  # batches are new tensors each time
"""
    )


_SENT = """
from nbguard.training.profiler.nonfinite.device_losses import DeviceLosses
noted, arrived, events = iter(range(10**6)), [], []
sent = DeviceLosses(torch, noted.__next__, lambda at, value: arrived.append((at, value)))
record = torch.cuda.Event.record
def recorded(event, *args):
    events.append(torch.cuda.is_current_stream_capturing())
    return record(event, *args)
torch.cuda.Event.record = recorded
def loss(value):
    return torch.tensor(value).to("cuda")
def wait():
    sent.turn_page()
    while not sent.poll():
        pass
    told, arrived[:] = list(arrived), []
    return told
"""


def test_losses_come_many_at_a_time_and_none_while_a_graph_is_recorded(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + _SENT
        + """
assert not sent.send(torch.tensor(1.0)), "it is in host memory"
assert not sent.send(torch.ones(1, device="cuda")), "it has a dimension"
assert sent.send(losses[1.0]) and sent.send(losses[math.nan])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    assert not sent.send(losses[2.0])
    sent.turn_page()
    sent.poll()
assert (events, arrived) == ([], [])
for _ in range(31):
    assert sent.send(loss(3.0))
assert events == [False], "the page is full once"
told = wait()
assert [at for at, _ in told] == list(range(33))
assert told[0][1] == 1.0 and math.isnan(told[1][1]) and {value for _, value in told[2:]} == {3.0}
"""
    )


def test_losses_are_held_without_their_graphs_and_no_longer_than_some_batches(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + _SENT
        + """
before = torch.cuda.memory_allocated()
most = 0
for _ in range(100):
    weight = torch.ones(2**20, device="cuda", requires_grad=True)
    assert sent.send((weight * 2).sum())
    del weight
    most = max(most, torch.cuda.memory_allocated() - before)
assert most == 32 * 512, most
sent.turn_page()
assert torch.cuda.memory_allocated() == before
assert len(wait()) == 100
"""
    )


@pytest.mark.parametrize("change", ["first.add_(1)", "sent.send(first)", "sent.send(first.detach())"])
def test_losses_that_change_while_they_are_held_are_copied_at_once_from_then_on(
    fake_cuda_run: Callable[..., str], change: str
) -> None:
    fake_cuda_run(
        _PRELUDE
        + _SENT
        + f"""
first = loss(1.0)
assert sent.send(first)
{change}
assert wait() == [], "what it was is not known any more"
before = torch.cuda.memory_allocated()
for value in (2.0, 3.0):
    later = loss(value)
    assert sent.send(later)
    {change.replace("first", "later")}
    del later
assert torch.cuda.memory_allocated() == before, "none is held"
told = [value for _, value in wait()]
assert told[0] == 2.0 and 3.0 in told, told
"""
    )


def test_what_is_forgotten_is_let_go_and_its_page_used_again(fake_cuda_run: Callable[..., str]) -> None:
    """What the profile costs is timed so: page-locked memory asked for anew in each call would be most of the figure."""
    fake_cuda_run(
        _PRELUDE
        + _SENT
        + """
assert sent.send(loss(1.0))
sent.forget()
before = torch.cuda.memory_allocated()
pages, zeros = [], torch.zeros
torch.zeros = lambda *args, **named: pages.append(args) or zeros(*args, **named)
for value in (2.0, 3.0):
    assert sent.send(loss(value))
    sent.forget()
    assert torch.cuda.memory_allocated() == before, "nothing is held"
assert sent.send(loss(4.0))
assert pages == []
assert [value for _, value in wait()] == [4.0]
"""
    )


def test_losses_are_copied_at_once_where_something_is_compiled(fake_cuda_run: Callable[..., str]) -> None:
    """What a CUDA graph of torch.compile gives is overwritten by its next run."""
    fake_cuda_run(
        _PRELUDE
        + _SENT
        + """
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
before = torch.cuda.memory_allocated()
for value in (1.0, 2.0):
    assert sent.send(loss(value))
    assert torch.cuda.memory_allocated() == before, "it is not held"
assert [value for _, value in wait()] == [1.0, 2.0]
"""
    )


def test_losses_of_another_stream_are_copied_in_that_one(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + _SENT
        + """
streams = []
copy = torch.Tensor.copy_
def copied(place, *args, **named):
    streams.append(torch.cuda.current_stream().cuda_stream)
    return copy(place, *args, **named)
torch.Tensor.copy_ = copied
other = torch.cuda.Stream()
values = [loss(float(value)) for value in range(4)]
assert sent.send(values[0])
with torch.cuda.stream(other):
    assert sent.send(values[1]) and sent.send(values[2])
assert sent.send(values[3])
assert [value for _, value in wait()] == [0.0, 1.0, 2.0, 3.0]
assert streams == [0, other.cuda_stream, other.cuda_stream, 0], streams
"""
    )


def test_what_is_in_use_is_the_users_where_it_is_read(fake_cuda_run: Callable[..., str]) -> None:
    """The levels of batches that are looked at, and what a loop that has ended leaves, hold no loss of the profile's."""
    fake_cuda_run(
        _PRELUDE
        + """
from nbguard.training.profiler.instruments.timeline import MemoryWatch
model = nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(torch.zeros(4 * 150, 4), batch_size=4)
def fit():
    begun, levels = [], []
    for x in loader:
        begun.append(torch.cuda.memory_allocated())
        model(x.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        levels.append(torch.cuda.memory_allocated())
    del x
    return begun, levels, torch.cuda.memory_allocated()
fit()
plain_begun, plain, left = fit()
memory, finite = MemoryWatch(), FiniteWatch()
with recording(memory, finite):
    begun, profiled, left_profiled = fit()
assert finite.observe().losses == 150
assert left_profiled == left, (left_profiled, left)
held = [now - before for now, before in zip(profiled, plain)]
assert held[:32] == [0] * 32 and 0 < max(held) <= 32 * 512 and min(held) == 0, held
samples = [(sample.batch, sample.allocated) for sample in memory.observe().samples]
assert samples[-1][0] > 100, samples
assert all(begun[batch - 1] == plain_begun[batch - 1] for batch, _ in samples), (samples, begun)
assert samples == [(batch, plain[batch - 1]) for batch, _ in samples], (samples, plain)
"""
    )
