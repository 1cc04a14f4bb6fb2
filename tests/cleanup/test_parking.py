"""Parking in this very process: data leaves, names and views stay, and what comes back is bit by bit what it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import nbguard
from nbguard.memory.cleanup.apply import apply as release
from nbguard.memory.cleanup.apply import parking as park
from nbguard.memory.cleanup.plan.plan import Outcome, Plan
from nbguard.memory.scan.parked import PARKED, parked_facts
from nbguard.memory.scan.scan import Notebook, scan

pytestmark = pytest.mark.usefixtures("frozen_libraries")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    gc.collect()
    yield
    assert not PARKED, "a test left something parked"


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.second(self.first(x).relu()))
        out: torch.Tensor = self.head(hidden)
        return out


def _park(names: dict[str, Any], *targets: str) -> Outcome:
    """Park, and assert that what was promised has left, to the byte."""
    outcome = nbguard.park(*targets, namespace=names)
    assert isinstance(outcome, Outcome)
    assert outcome.realised == outcome.plan.promised > 0
    assert not outcome.extra
    assert not outcome.undone
    assert not outcome.survivors
    return outcome


def _refused(names: dict[str, Any], *targets: str) -> str:
    with pytest.raises(nbguard.TargetError) as refused:
        nbguard.park(*targets, namespace=names)
    return str(refused.value)


def _nothing_to_unpark(*names: str) -> str:
    with pytest.raises(nbguard.TargetError) as refused:
        nbguard.unpark(*names)
    return str(refused.value)


def _experiment(seed: int) -> tuple[nn.Module, Any, Any, Callable[[], float]]:
    """Return a model, its optimizer, a loss scaler with state of its own, and a function that trains for one step."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    dice = torch.Generator().manual_seed(seed)

    def step() -> float:
        x = torch.randn(32, 16, generator=dice)
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return model, optimizer, scaler, step


def test_training_goes_on_as_if_never_parked() -> None:
    model, optimizer, scaler, step = _experiment(1)
    _, _, other_scaler, reference = _experiment(1)
    assert [step() for _ in range(3)] == [reference() for _ in range(3)]
    before = copy.deepcopy(optimizer.state_dict())
    names = {"run": (model, optimizer, scaler)}

    outcome = _park(names, "run")
    held = sum(t.untyped_storage().nbytes() for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    assert outcome.plan.promised > 3 * held / 2  # gradients and the optimizer's two moments too
    back = nbguard.unpark("run")

    assert back.nbytes == outcome.realised
    assert not back.left
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    assert [step() for _ in range(5)] == [reference() for _ in range(5)]
    assert scaler.state_dict() == other_scaler.state_dict()


SHARED = {
    "a state dict": ("checkpoint", "checkpoint = {'model': net.state_dict(), 'own': ones(4)}", ("net", "opt"), 16),
    "an optimizer's state": ("checkpoint", "checkpoint = {'opt': opt.state_dict(), 'own': ones(4)}", ("opt",), 16),
    "weights, of which something else needs the gradients": (
        "net",
        "p = net.head.bias.grad; checkpoint = net.state_dict(); del opt",
        ("checkpoint", "p"),
        0,
    ),
    "a state dict outside": ("net", "checkpoint = net.state_dict()", ("opt", "checkpoint"), 0),
    "a view": ("base", "base = ones(9); row = base[3:]", ("row",), 0),
    "the base of a view": ("row", "base = ones(9); row = base[3:]", ("base",), 0),
    "tied weights": ("a", "a, b = Linear(4, 4), Linear(4, 4, bias=False); b.weight = a.weight", ("b",), 16),
    "a shallow copy": ("m", "m = Linear(4, 4); other = copy.copy(m)", ("other",), 0),
    "a part in another model": ("m", "m = Linear(4, 4); other = Sequential(m, Linear(4, 1))", ("other",), 0),
    "an optimizer": ("net", "", ("opt",), 136),  # buffers are the model's alone
    "a data set": ("items", "items = [ones(9)]; dl = DataLoader(TensorDataset(items[0]))", ("dl",), 0),
    "a closure": ("x", "x = ones(9)\ndef f(y=x): return y", ("f",), 0),
    "an attribute": ("x", "x = ones(9)\nclass Exp: pass\nexp = Exp(); exp.x = x[3:]", ("exp",), 0),
    "an optimizer in a dict": ("net", "runs = {'opt': opt}; del opt", ("runs['opt']",), 136),
}


@pytest.mark.parametrize(("target", "code", "others", "own"), SHARED.values(), ids=SHARED)
def test_what_something_else_needs_stays_and_both_are_named(target: str, code: str, others: tuple[str, ...], own: int) -> None:
    net, opt, _, _ = _experiment(0)
    used = {"Linear": nn.Linear, "Sequential": nn.Sequential, "DataLoader": DataLoader, "TensorDataset": TensorDataset}
    names: dict[str, Any] = {**used, "copy": copy, "ones": torch.ones, "net": net, "opt": opt}
    net(torch.ones(2, 16)).sum().backward()
    opt.step()
    del net, opt
    exec(code, names)

    said = _refused(names, target) if not own else "".join(_park(names, target).plan.skipped)

    command = said.partition("nbguard.park(")[2].partition(")`")[0] or said.partition("--park ")[2].partition("`")[0]
    assert command.replace('"', "").replace(",", "").split() == [target, *others]
    assert sum(fact.nbytes for fact in parked_facts()) == own
    if own:
        nbguard.unpark()
    whole = nbguard.park(target, *others, dry_run=True, namespace=names)
    assert isinstance(whole, Plan)
    assert whole.promised > own


def test_whoever_has_the_whole_thing_does_not_keep_it() -> None:
    net, opt, _, step = _experiment(0)
    _, _, _, reference = _experiment(0)
    assert step() == reference()
    loss = net(torch.ones(2, 16)).sum()  # its graph leads to the parameters
    names = {
        "run": (net, opt),
        "net": net,
        "opt": opt,
        "runs": [net],
        "body": net.first,
        "copied": copy.deepcopy(net),
        "loss": loss,
    }

    outcome = _park(names, "run")

    assert outcome.plan.promised == sum(t.nbytes for t in _all_of(net, opt))
    nbguard.unpark()
    assert [step() for _ in range(3)] == [reference() for _ in range(3)]


def test_what_was_made_of_a_parked_tensor_comes_back_without_it() -> None:
    names = {"net": nn.Linear(8, 8, bias=False), "t": torch.ones(9)}
    _park(names, "net", "t")
    names, storage = {"saved": names["net"].state_dict()}, names["t"].untyped_storage()

    parked = {fact.label: fact.nbytes for fact in parked_facts()}
    held = nbguard.report(names).devices[0].holders
    back = nbguard.unpark()
    left = {fact.label: fact.nbytes for fact in parked_facts()}
    del storage

    assert (parked, [holder.label for holder in held if holder.label == "saved"]) == ({"net": 256, "t": 36}, [])
    assert (back.nbytes, back.left, left) == (256, (("t", 36, "something outside Python shares it"),), {"t": 36})
    assert nbguard.release("saved", namespace=names).realised == 256
    assert "nothing is parked" in _nothing_to_unpark("t")


def test_a_step_of_an_optimizer_whose_state_is_parked_says_so() -> None:
    net, opt, _, step = _experiment(0)
    step()
    _park({"opt": opt, "net": net}, "opt")

    with pytest.raises(nbguard.ParkedError, match=re.escape('nbguard.unpark("opt")')):
        opt.step()
    copy.deepcopy(opt).step()
    nbguard.unpark()
    step()


def _all_of(net: nn.Module, opt: Any) -> list[torch.Tensor]:
    tensors = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None)]
    return tensors + [t for state in opt.state.values() for t in state.values()]


def test_values_are_there_while_parked() -> None:
    base = torch.arange(1000.0)
    rows, third = base.view(10, 100), base[300:].t()
    names = {"base": base, "rows": rows}

    _park(names, "base", "rows")

    assert torch.equal(base, torch.arange(1000.0))
    assert rows.data_ptr() == base.data_ptr() == third.data_ptr() - 1200
    rows[0, 0] = 7  # one storage still
    assert base[0] == 7
    nbguard.unpark()
    assert base[0] == rows[0, 0] == 7
    third[0] = 9
    assert base[300] == 9
    assert base.untyped_storage().resizable()  # an ordinary storage again


def test_what_was_made_while_parked_comes_back_with_the_rest() -> None:
    names = {"base": torch.ones(500)}
    _park(names, "base")
    view = names["base"][100:]

    back = nbguard.unpark("base")

    assert (back.nbytes, back.tensors) == (2000, 2)
    view.fill_(3)
    assert names["base"].sum() == 100 + 3 * 400


def test_layout_dtype_and_flags_stay() -> None:
    made = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": torch.randn(7, 3).half().t(),
        "bits": torch.tensor([True, False, True]),
        "complex": torch.randn(5, dtype=torch.complex64),
        "scalar": torch.tensor(3.0),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "parameter": nn.Parameter(torch.randn(4, 4)),
        "frozen": nn.Parameter(torch.randn(4), requires_grad=False),
        "shifted": torch.randn(100)[10:20],
    }
    before = {name: (t.detach().clone(), t.stride(), t.storage_offset(), t.requires_grad, type(t)) for name, t in made.items()}

    _park({"made": made}, "made")
    nbguard.unpark()

    for name, t in made.items():
        values, *rest = before[name]
        assert torch.equal(t.detach(), values), name
        assert [t.stride(), t.storage_offset(), t.requires_grad, type(t)] == rest, name


def test_a_graph_that_is_still_needed_works_afterwards() -> None:
    weight = nn.Parameter(torch.randn(30, 30))
    x = torch.randn(5, 30)
    loss = (x @ weight).square().sum()
    expected = torch.autograd.grad((x @ weight).square().sum(), weight)[0]
    names = {"weight": weight, "loss": loss}

    _park(names, "weight")
    nbguard.unpark()
    loss.backward()

    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_what_a_graph_has_of_its_own_stays() -> None:
    """`exp` keeps its result in C++: that storage cannot be moved by anyone, so it is not promised either."""
    x = torch.randn(200, requires_grad=True)
    y = x.exp()
    names = {"pair": (x, y)}

    outcome = _park(names, "pair")

    assert outcome.plan.promised == 800
    assert "autograd graph" in outcome.plan.skipped[0]
    nbguard.unpark()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)


_SHARES = {
    "numpy": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
    "buffer": lambda t: memoryview(t.numpy()),
    "dlpack": np.from_dlpack,
    "dlpack of another tensor": lambda t: np.from_dlpack(t.detach()),
    "capsule": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("share", _SHARES.values(), ids=_SHARES)
def test_what_somebody_else_points_into_stays(share: Callable[[torch.Tensor], Any]) -> None:
    shared, free = torch.ones(100), torch.ones(50)
    other = share(shared)
    names = {"both": [shared, free], "other": other}

    outcome = _park(names, "both")

    assert outcome.plan.promised == 200
    assert outcome.plan.skipped
    nbguard.unpark()
    shared[0] = 5
    assert other is not None
    assert shared[0] == 5


def test_sparse_and_conjugate_tensors_stay() -> None:
    sparse = torch.eye(5).to_sparse()
    conjugate = torch.randn(9, dtype=torch.complex64).conj()
    text = _refused({"odd": [sparse, conjugate]}, "odd")

    assert "cannot be parked" in text
    assert sparse.to_dense().trace() == 5


def test_a_name_that_reaches_nothing_is_one_line() -> None:
    assert "leads to no" in _refused({"n": 5, "t": torch.ones(3)}, "n") or "holds no memory" in _refused({"n": 5}, "n")
    assert "nothing is parked" in _nothing_to_unpark()
    names = {"t": torch.ones(3)}
    _park(names, "t")
    assert "parked now: t" in _refused(names, "t")
    assert "nothing is parked as u; parked now: t" in _nothing_to_unpark("u")
    nbguard.unpark("t")


def test_a_call_of_a_parked_model_says_how_to_bring_it_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    names = {"model": model}
    state = copy.deepcopy(model.state_dict())
    _park(names, "model")

    for part in (model, model[0], model[2]):
        with pytest.raises(nbguard.ParkedError, match=re.escape('nbguard.unpark("model")')):
            part(torch.ones(1, 4))
    torch.testing.assert_close(dict(model.state_dict()), dict(state))  # saving it works
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(model), torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model))):
        copied(torch.ones(1, 4))  # a copy is not parked
    nbguard.unpark()
    model(torch.ones(1, 4))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_storage_that_only_garbage_has_comes_back() -> None:
    model = nn.Linear(4, 4)
    _park({"model": model}, "model")
    gc.disable()
    try:
        cycle: list[Any] = [model.weight.untyped_storage()]
        cycle.append(cycle)
        del cycle
        assert not nbguard.unpark().left
    finally:
        gc.enable()


class Wrapped(nn.Module):
    """A model that looks at its parameters before it hands its call on, as wrappers for several devices do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the wrapper ran")


def test_what_only_contains_what_is_parked_is_stopped_too() -> None:
    model = Wrapped(nn.Linear(4, 1))
    _park({"model": model}, "model")

    with pytest.raises(nbguard.ParkedError):
        model(torch.ones(1, 4))
    before = model.inner.weight.data_ptr()
    model.to("cpu").double().float()  # stays on the host
    assert before != 0
    nbguard.unpark()
    with pytest.raises(RuntimeError, match="the wrapper ran"):
        model(torch.ones(1, 4))


def test_a_move_to_a_device_is_stopped_and_others_are_not() -> None:
    model, other = nn.LSTM(4, 4), nn.Linear(4, 1)
    _park({"model": model}, "model")

    with pytest.raises(nbguard.ParkedError):
        model.to("meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert other.to("meta").weight.is_meta
    nbguard.unpark()
    assert next(model.to("meta").parameters()).is_meta
    assert type(nn.Module._apply).__name__ == "function"


class Noisy(torch.Tensor):
    """A tensor whose every use is code of the user's own, which fails."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"{func} ran the user's code")


def test_tensors_of_any_kind_may_live_beside_what_is_parked() -> None:
    beside = [nn.LazyLinear(5), torch.ones(3).as_subclass(Noisy)]
    names = {"t": torch.ones(1000), "noisy": torch.ones(1000).as_subclass(Noisy)}

    _park(names, "t", "noisy")
    assert nbguard.unpark().nbytes == 8000

    assert len(beside) == 2
    assert names["t"].sum() == 1000


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_nested_stays_and_the_rest_is_parked() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)
    packed = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
    names = {"odd": [jagged, packed, torch.ones(1000)]}

    outcome = _park(names, "odd")

    assert outcome.plan.promised >= 4000
    assert "80 B stays" in outcome.plan.skipped[0]  # the packed one: values and offsets of the jagged one are tensors
    nbguard.unpark()
    assert jagged.offsets().tolist() == [0, 3, 5]
    assert [float(part.sum()) for part in (jagged * 2).unbind()] == [24, 16]
    assert [float(part.sum()) for part in (*jagged.unbind(), *packed.unbind())] == [12, 8, 12, 8]


def test_under_modes_of_torch_it_is_the_same() -> None:
    """No mode of the user's sees what is moved, and none changes it: the parameter still learns afterwards."""
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    names = {"weight": nn.Parameter(torch.ones(100))}
    for mode in (torch.inference_mode(), Mode(), FakeTensorMode(), torch.device("meta")):
        with mode:
            _park(names, "weight")
        with mode:
            nbguard.unpark()
        names["weight"].square().sum().backward()

    assert names["weight"].grad is not None
    assert float(names["weight"].grad[0]) == 8  # all four of them
    assert not seen


def test_parameters_put_in_the_place_of_parked_ones_can_be_used() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    _park({"model": model}, "model")

    model.load_state_dict({name: torch.ones_like(t) for name, t in model.state_dict().items()}, assign=True)
    gc.collect()

    assert model(torch.ones(1, 4)).item() == 21
    assert "nothing is parked" in _nothing_to_unpark("model")
    assert not any(module._forward_pre_hooks for module in model.modules())


class _Door:
    """A lock; whoever takes it is interrupted before anything else can happen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, *, blocking: bool) -> bool:
        taken = self._lock.acquire(blocking=blocking)
        signal.raise_signal(signal.SIGINT)
        return taken


def test_an_interrupt_at_the_door_locks_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    door = _Door()
    monkeypatch.setattr(release, "_ONE_AT_A_TIME", door)
    names = {"t": torch.ones(1000)}
    stopped = nbguard.park("t", namespace=names)
    assert isinstance(stopped, Outcome)
    assert (stopped.interrupted, stopped.realised, door.locked()) == (True, 0, False)
    assert nbguard.release("t", namespace=names).interrupted
    monkeypatch.undo()

    assert "t" in names
    _park(names, "t")
    monkeypatch.setattr(release, "_ONE_AT_A_TIME", door)
    assert nbguard.unpark().left[0][1] == 4000
    assert not door.locked()
    monkeypatch.undo()
    assert nbguard.unpark().nbytes == 4000


def test_nothing_is_kept_alive() -> None:
    names = {"t": torch.ones(1000)}
    _park(names, "t")
    weak = StorageWeakRef(names["t"].untyped_storage())
    names.clear()
    gc.collect()

    assert weak.expired()
    assert "nothing is parked" in _nothing_to_unpark()


def test_a_dry_run_moves_nothing() -> None:
    names = {"t": torch.ones(1000)}
    address = names["t"].data_ptr()

    plan = nbguard.park("t", dry_run=True, namespace=names)

    assert isinstance(plan, Plan)
    assert plan.promised == 4000
    assert names["t"].data_ptr() == address


def test_the_report_says_what_is_parked_and_counts_it_no_more() -> None:
    names = {"t": torch.ones(1 << 19), "u": torch.ones(10)}
    _park(names, "t")

    report = nbguard.report(names)

    assert {h.label: h.retained for h in report.devices[0].holders if h.kind == "name"} == {"u": 40}
    assert [f.command for f in report.findings if f.kind == "parked"] == ["%reset_gpu --unpark t"]
    nbguard.unpark("t")
    assert {h.label: h.retained for h in nbguard.report(names).devices[0].holders if h.kind == "name"}["t"] == 1 << 21


def test_what_fails_or_is_interrupted_halfway_is_told_truly(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((100,), float(n)) for n in range(4)]
    views = [t[50:] for t in tensors]
    names = {"tensors": tensors}
    real, made = park._in_a_file, []

    def full_disk(nbytes: int) -> Any:
        made.append(nbytes)
        if len(made) == 3:
            raise OSError(28, "No space left on device")
        return real(nbytes)

    monkeypatch.setattr(park, "_in_a_file", full_disk)
    outcome = nbguard.park("tensors", namespace=names)

    assert isinstance(outcome, Outcome)
    assert "No space left" in outcome.undone[0][1]
    assert (outcome.plan.promised, outcome.realised) == (1600, 1200)
    assert {nbytes for _, nbytes in outcome.survivors} == {400}
    assert [float(view[0]) for view in views] == [0, 1, 2, 3]
    assert sum(fact.nbytes for fact in parked_facts()) == 1200
    assert nbguard.unpark("tensors").nbytes == 1200

    seen = scan(Notebook(shell=None, namespace=names), tensors=True)
    asked = iter([False, False, True])
    numbers = [n for n, s in enumerate(seen.facts.graph.storages) if s.nbytes == 400]
    assert "interrupted" in park.park("tensors", numbers, seen.tracker, lambda: next(asked))
    assert sum(fact.nbytes for fact in parked_facts()) == 800
    assert nbguard.unpark().nbytes == 800
    assert all(torch.equal(t, torch.full((100,), float(n))) for n, t in enumerate(tensors))


def test_frozen_tensors_come_back(frozen_libraries: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc.freeze()` hides what there is from the collector's list of objects. The last test: it thaws the libraries, too."""
    monkeypatch.setattr(gc, "unfreeze", frozen_libraries)
    names = {"base": torch.ones(1000)}
    _park(names, "base")
    view = names["base"][500:]
    gc.freeze()
    try:
        assert nbguard.unpark().nbytes == 4000
    finally:
        gc.unfreeze()

    view.fill_(2)
    assert names["base"].sum() == 1500
    assert view.untyped_storage().resizable()
