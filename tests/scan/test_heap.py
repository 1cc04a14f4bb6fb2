"""The heap walk in this very process: real tensors, graphs, arrays, frames; and what it must not do."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

import nbguard
from nbguard.memory.cleanup.plan.plan import Outcome
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.references.graph import reach, storages_of
from nbguard.memory.core.references.holders import Holder, holders
from nbguard.memory.scan.scan import Notebook, scan

pytestmark = pytest.mark.usefixtures("frozen_libraries")


@pytest.fixture(autouse=True)
def _nothing_left_by_others() -> None:
    """Reports see the whole process: cycles that earlier tests left would be promised too."""
    gc.collect()


def _scan_once(**names: Any) -> Facts:
    return scan(Notebook(shell=None, namespace=names)).facts


def _bytes(facts: Facts, name: str) -> int:
    """Return the bytes that a name reaches."""
    root = next(root for root in facts.graph.roots if root.label == name)
    return sum(facts.graph.storages[s].nbytes for s in storages_of(facts.graph, reach(facts.graph, root.nodes)))


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def test_a_storage_is_counted_once_however_many_tensors_share_it() -> None:
    base = torch.ones(1000)

    facts = _scan_once(base=base, view=base[10:], rows=[base.view(10, 100), base.numpy()])

    assert _bytes(facts, "base") == _bytes(facts, "view") == _bytes(facts, "rows") == 4000
    assert sum(holder.retained for holder in holders(facts.graph) if holder.kind in ("name", "shared")) == 4000


def test_a_graph_keeps_parameters_and_saved_tensors() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    loss = net(torch.ones(7, 10)).sum()
    expected = {_storage(p).cdata for p in net.parameters()}
    parameters = sum(p.numel() * 4 for p in net.parameters())
    del net

    facts = _scan_once(loss=loss)

    assert len(expected) == 4
    assert _bytes(facts, "loss") >= parameters + 7 * 20 * 4 + 4 - 4  # the last layer's bias is not needed for a sum's gradient


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="it does not say which saved tensors have hooks",
)
def test_saved_tensors_with_hooks_of_the_users_are_not_unpacked() -> None:
    unpacked = []

    def unpack(packed: Any) -> torch.Tensor:
        unpacked.append(packed)
        return packed[0]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach(), "packed"), unpack):
        y = torch.ones(300, requires_grad=True).exp().sum()

    facts = _scan_once(y=y)

    assert unpacked == []
    assert _bytes(facts, "y") >= 1200


@pytest.mark.parametrize("says_who_has_hooks", [True, False])
def test_a_checkpointed_forward_pass_is_not_run_again(monkeypatch: pytest.MonkeyPatch, says_who_has_hooks: bool) -> None:
    if not says_who_has_hooks:  # as torch 2.4
        monkeypatch.delattr(torch._C._autograd.SavedTensor, "unpack_hook", raising=False)
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().sin()

    x = torch.ones(300, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).sum()

    facts = _scan_once(loss=loss)

    assert _bytes(facts, "loss") >= 4
    assert len(calls) == 1
    loss.backward()
    assert x.grad is not None


def test_gradients_views_sparse_parts_and_object_arrays_are_found() -> None:
    leaf = torch.ones(100, requires_grad=True)
    (leaf * 2).sum().backward()
    array = np.empty(2, dtype=object)
    array[1] = torch.ones(50)
    sparse = torch.eye(8).to_sparse()

    facts = _scan_once(leaf=leaf, array=array, sparse=sparse, storage=torch.ones(25).untyped_storage())

    assert _bytes(facts, "leaf") == 800
    assert _bytes(facts, "array") == 200
    assert _bytes(facts, "sparse") == 8 * 4 + 2 * 8 * 8
    assert _bytes(facts, "storage") == 100


@pytest.mark.parametrize("size", [3, 5000])
def test_a_tensor_deep_in_plain_containers_is_found_however_large_they_are(size: int) -> None:
    t = torch.ones(40)
    rows: list[Any] = [{"id": n, "parts": [(n, str(n), {"x": [n]})]} for n in range(size)]
    rows[size // 2]["parts"][0][2]["x"].append(t)

    assert _bytes(_scan_once(rows=rows), "rows") == 160


def test_a_suspended_generator_a_closure_and_a_partial_are_looked_into() -> None:
    import functools

    def generate(t: torch.Tensor) -> Any:
        yield 1
        yield t

    generator = generate(torch.ones(10))
    next(generator)
    t, u = torch.ones(20), torch.ones(30)

    facts = _scan_once(generator=generator, closure=lambda: t, partial=functools.partial(print, u))

    assert [_bytes(facts, name) for name in ("generator", "closure", "partial")] == [40, 80, 120]


def test_copies_without_data_are_not_counted_as_garbage_that_holds_memory() -> None:
    gc.collect()
    gc.disable()
    try:
        for device in ("cpu", "meta", "meta"):
            model: Any = torch.nn.Linear(64, 64, device=device)
            model.itself = [model]
        del model
        (garbage,) = (holder for holder in nbguard.report({}).devices[0].holders if holder.label == "unreachable cycles")
        assert garbage.what == "an earlier Linear, in a cycle: Linear.itself[0] → Linear"
    finally:
        gc.enable()


def test_an_unreachable_cycle_is_garbage_and_its_bytes_are_promised() -> None:
    gc.collect()
    gc.disable()
    try:
        cycle: dict[str, Any] = {"t": torch.ones(12_345)}
        cycle["self"] = cycle
        del cycle
        planned = nbguard.plan(namespace={})
        outcome = nbguard.release(namespace={})
    finally:
        gc.enable()

    assert planned.promised >= 4 * 12_345
    assert outcome.realised >= 4 * 12_345
    assert outcome.survivors == ()


def test_what_a_running_function_holds_is_in_use_and_its_locals_stay() -> None:
    t = torch.ones(54_321)
    mine = locals()

    rows = {holder.label: holder.retained for holder in nbguard.report({}).devices[0].holders}

    assert rows["running test_what_a_running_function_holds_is_in_use_and_its_locals_stay()"] == 4 * 54_321
    assert mine["t"] is t


def test_looking_keeps_no_object_alive() -> None:
    class Thing:
        pass

    thing = Thing()
    thing.t = torch.ones(100)  # type: ignore[attr-defined]
    died, storage = weakref.ref(thing), _storage(thing.t)  # type: ignore[attr-defined]
    names = {"thing": thing}

    report = nbguard.report(names)
    plan = nbguard.plan(namespace=names)
    why = nbguard.why("thing", names)
    del thing
    names.clear()

    assert died() is None
    assert storage.expired()
    assert (report.tracked, why.name) == ("cpu", "thing")
    assert plan.promised >= 0


def test_looking_is_the_same_twice() -> None:
    names = {"a": torch.ones(10), "b": [torch.ones(20)]}

    assert nbguard.report(names).devices[0].holders == nbguard.report(names).devices[0].holders


def test_an_int_a_string_and_a_module_are_no_holders() -> None:
    facts = _scan_once(n=3, s="text", m=torch, f=len)

    assert not {root.label for root in facts.graph.roots} & {"n", "s", "m", "f"}


class _Own(types.ModuleType):
    """A module with a class of its own, as lazily loaded ones have: whatever is not there yet is loaded, and that fails."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)


def test_modules_with_a_class_of_their_own_are_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, loose, library = _Own("mine"), _Own("loose"), _Own(_LIBRARY)
    loaded.__dict__.update(__file__="/home/me/mine.py", x=torch.ones(10))
    loose.__dict__["y"] = torch.ones(20)
    library.__dict__["z"] = torch.ones(30)
    monkeypatch.setitem(sys.modules, "mine", loaded)
    monkeypatch.setitem(sys.modules, _LIBRARY, library)

    names = {"mine": loaded, "loose": loose}
    del loaded, loose, library
    report = nbguard.report(names)

    held = {holder.label: (holder.kind, holder.retained) for holder in report.devices[0].holders if holder.retained}
    assert held == {"mine.x": ("module", 40), "loose": ("name", 80), f"{_LIBRARY}.z": ("library", 120)}
    assert [path.text for path in nbguard.why("loose.y", names).paths] == ["loose.y"]


def test_release_by_name_deletes_the_name_and_measures() -> None:
    names = {"a": torch.ones(1000), "b": torch.ones(10)}

    outcome = nbguard.release("a", namespace=names)

    assert list(names) == ["b"]
    assert (outcome.plan.promised, outcome.realised, outcome.extra) == (4000, 4000, 0)


def test_a_target_that_fails_halfway_is_reported_and_the_rest_goes_on() -> None:
    class Stubborn(dict):  # type: ignore[type-arg]
        def __delitem__(self, key: object) -> None:
            if key == "a":
                raise PermissionError("not this one")

    names = {"runs": Stubborn(a=torch.ones(5)), "b": torch.ones(10)}

    outcome = nbguard.release("runs['a']", "b", namespace=names)

    assert outcome.undone == (("runs['a'] not deleted", "PermissionError: not this one"),)
    assert outcome.realised == 40
    assert outcome.plan.promised == 60
    assert [nbytes for _, nbytes in outcome.survivors] == [20]


def test_no_such_target_touches_nothing() -> None:
    names = {"a": torch.ones(1000)}

    with pytest.raises(nbguard.TargetError, match="does not exist"):
        nbguard.release("a", "nope", namespace=names)
    assert list(names) == ["a"]


class _Loop:
    """An object in a cycle of Python's own."""

    def __init__(self) -> None:
        self.me = self


def _hook_on_its_own_tensor() -> None:
    y = torch.randn(1000, requires_grad=True) * 2
    y.register_hook(lambda grad, y=y: grad)


def _hook_after_accumulation() -> None:
    p = torch.nn.Parameter(torch.randn(1000))
    p.register_post_accumulate_grad_hook(lambda param, p=p: None)


def _view_on_its_base() -> None:
    base = torch.randn(1000)
    base.view_of_it = base[:2]


def _cycles() -> list[Holder]:
    return [holder for holder in nbguard.report({}).devices[0].holders if holder.label == "unreachable C++ cycle"]


@pytest.mark.parametrize("make", [_hook_on_its_own_tensor, _hook_after_accumulation, _view_on_its_base])
def test_a_cycle_through_cpp_is_named_and_broken(make: Callable[[], None]) -> None:
    nbguard.release(namespace={})  # what other tests have left
    make()

    (holder,) = _cycles()
    outcome = nbguard.release(namespace={})

    assert holder.retained >= 4000
    assert holder.stale
    assert "Python cannot collect such a cycle" in holder.what
    assert outcome.realised >= holder.retained
    assert (outcome.plan.promised, outcome.extra, outcome.survivors) == (outcome.realised, 0, ())
    assert not _cycles()


def _graphs_that_the_collector_frees() -> None:
    loop: Any = _Loop()
    loop.net = torch.nn.Linear(100, 100)
    loop.loss = loop.net(torch.randn(9, 100)).sum()
    loop.loss.backward()
    loop.out = loop.net(torch.randn(9, 100)).exp()  # exp saves its own result
    loop.view = loop.out[1:]


def _context_with_its_output() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.y = x * 2
            return ctx.y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    y = Double.apply(torch.randn(1000, requires_grad=True))
    y.grad_fn.mine = y


def _hook_on_a_leaf() -> None:
    p = torch.nn.Parameter(torch.randn(1000))
    p.register_hook(lambda grad, p=p: None)


def _release_of(make: Callable[[], None]) -> Outcome:
    """Return what a cleanup does about the garbage that `make` leaves, before Python collects it by itself."""
    gc.collect()
    gc.disable()
    try:
        make()
        return nbguard.release(namespace={})
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [_graphs_that_the_collector_frees, _context_with_its_output, _hook_on_a_leaf])
def test_a_cycle_that_only_touches_cpp_is_freed_as_promised(make: Callable[[], None]) -> None:
    outcome = _release_of(make)

    assert outcome.plan.promised >= 4000
    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)


def test_a_long_chain_of_finished_frames_is_followed_to_its_end() -> None:
    """Garbage that dozens of nested calls lead to, as the imports do that an optimizer's first construction makes."""

    def nest(depth: int) -> None:
        if depth:
            return nest(depth - 1)
        try:
            raise ValueError
        except ValueError as error:
            kept = error  # noqa: F841 - the frame holds the error, the error's traceback the frame
        return None

    def make() -> None:
        loop: Any = _Loop()
        loop.net = torch.nn.Linear(100, 100)
        nest(60)  # its innermost frame lives on, and holds all the frames that called it, this one too

    outcome = _release_of(make)

    assert outcome.plan.promised >= 40_400
    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)


_LIBRARY = "library_of_this_test"
_BOXES: list[list[Any]] = []


def _pass_on(event: str, args: tuple[Any, ...]) -> None:
    """Do what another thread may: put a tensor into a list while its holders are asked for, and take it out again."""
    for box in _BOXES:
        if event == "gc.get_referrers":
            box.append(sys.modules[_LIBRARY].tensor)
        elif event == "gc.get_referents" and any(obj is box for obj in args[0]):
            box.clear()


def test_a_holder_that_lets_go_while_it_is_asked_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = types.ModuleType(_LIBRARY)
    library.tensor = torch.ones(10**6)
    monkeypatch.setitem(sys.modules, _LIBRARY, library)
    sys.addaudithook(_pass_on)  # for good: without boxes it does nothing
    _BOXES.append([])
    try:
        facts = _scan_once(box=_BOXES[0])
    finally:
        _BOXES.clear()

    labels = [root.label for root in facts.graph.roots if root.kind == "library"]
    assert f"{_LIBRARY}.tensor" in labels
    assert "a list that you hold" not in labels


_ASKED_OF_ASYNCIO: list[bool] = []
_IS_NOTED = [False]


def _note_whom(event: str, args: tuple[Any, ...]) -> None:
    if _IS_NOTED[0] and event == "gc.get_referents":
        _ASKED_OF_ASYNCIO.append(any(obj is sys.modules["_asyncio"] for obj in args[0]))


@pytest.mark.parametrize("held", [1, 20])
def test_asyncios_module_is_never_asked(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """CPython 3.12.0 to 3.12.5 would hang: a process of its own could show that, on such a Python only."""
    import _asyncio

    library: Any = types.ModuleType(_LIBRARY)
    library.tensors = [[torch.ones(10**5)] for _ in range(held)]
    monkeypatch.setitem(sys.modules, _LIBRARY, library)
    sys.addaudithook(_note_whom)  # for good: it does nothing unless it is told to
    _IS_NOTED[0] = True
    try:
        facts = _scan_once(mine=_asyncio)
    finally:
        _IS_NOTED[0] = False

    assert f"{_LIBRARY}.tensors" in [root.label for root in facts.graph.roots if root.kind == "library"]
    assert _ASKED_OF_ASYNCIO
    assert not any(_ASKED_OF_ASYNCIO)
    _ASKED_OF_ASYNCIO.clear()


def test_beside_running_code_a_cycle_is_neither_called_garbage_nor_said_to_be_in_use() -> None:
    """What that code holds in C is no more reached than garbage is: before it ends nobody can tell them apart."""
    gc.disable()
    try:
        cycle: list[Any] = [torch.ones(1 << 20)]
        cycle.append(cycle)
        del cycle
        facts = scan(Notebook(shell=None, namespace={}, is_running=True)).facts
        (root,) = (root for root in facts.graph.roots if root.label == "memory that no name reaches")
        assert root.kind == "library"
        assert root.what == "unreachable cycles, or in use by the code that runs: known when it ends"
        assert _bytes(facts, root.label) >= 4 << 20
        assert any(root.kind == "garbage" for root in _scan_once().graph.roots)
    finally:
        gc.enable()
