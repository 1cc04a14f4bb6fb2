"""An object with a name that a library has as well is not promised by the name; what waits for the collector holds nothing."""

from __future__ import annotations

import gc
import io
import logging
import pickle
import types
from typing import Any

import numpy
import pytest
import torch

from nbguard.memory.cleanup.apply.apply import apply
from nbguard.memory.cleanup.figures import release_of_root
from nbguard.memory.cleanup.plan.plan import Outcome, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.references.holders import holders
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.targets import resolve_targets

pytestmark = pytest.mark.usefixtures("frozen_libraries")

_BYTES = 4 * 50_000


class Box:
    """An object of the user's."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def _release(names: dict[str, Any], *targets: str) -> tuple[dict[str, int], Outcome]:
    """Delete targets as `%reset_gpu` does; return the bytes that each holder had before, and the outcome."""
    notebook = Notebook(shell=None, namespace=names)
    seen = scan(notebook)
    request = Request(targets=resolve_targets(targets, names, {}, {}))
    rows = {row.label: row.retained for row in holders(seen.facts.graph)}
    return rows, apply(plan_cleanup(seen.facts, request), notebook, seen).outcome


def _is_exact(outcome: Outcome) -> bool:
    return (outcome.realised, outcome.extra, outcome.survivors) == (outcome.plan.promised, 0, ())


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_a_library_has_besides_is_not_promised(library: types.ModuleType, depth: int) -> None:
    kept: Any = Box(data=torch.ones(50_000))
    names = {"kept": kept, "own": torch.ones(50_000)}
    for _ in range(depth):
        kept = [kept]
    library.__dict__["registry"] = kept
    del kept

    rows, outcome = _release(names, "kept", "own")

    assert _is_exact(outcome)
    assert outcome.realised == _BYTES
    assert rows["own"] == _BYTES
    assert rows["kept + library_of_this_test.registry"] == _BYTES
    assert rows["kept"] == 0


@pytest.mark.parametrize(("targets", "freed"), [(("box",), 0), (("attributes",), 0), (("box", "attributes"), _BYTES)])
def test_an_objects_dict_keeps_what_the_object_has(targets: tuple[str, ...], freed: int) -> None:
    """Python 3.13 shows the collector the values behind the object alone."""
    box = Box()
    box.data = torch.ones(50_000)  # type: ignore[attr-defined]
    names = {"box": box, "attributes": vars(box)}
    del box

    rows, outcome = _release(names, *targets)

    assert _is_exact(outcome)
    assert outcome.realised == freed
    assert rows["box + attributes"] == _BYTES


def test_a_library_has_the_object_of_a_named_dict(library: types.ModuleType) -> None:
    box = Box()
    box.data = torch.ones(50_000)  # type: ignore[attr-defined]
    names = {"attributes": vars(box)}
    library.__dict__["registry"] = [box]
    del box

    rows, outcome = _release(names, "attributes")

    assert _is_exact(outcome)
    assert outcome.realised == 0
    assert rows["attributes + library_of_this_test.registry"] == _BYTES


_OF_PARAMETRIZED = 4 * (1000 * 100 * 3 + 1000)
"""Bytes of a convolution and of the norms that its weight has got."""


def _parametrized() -> torch.nn.Module:
    """A module with a class of its own, whose property refers to the module."""
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(100, 1000, 3, bias=False))


def test_a_class_that_was_made_for_a_module_goes_with_it() -> None:
    rows, outcome = _release({"net": torch.nn.Sequential(_parametrized(), _parametrized())}, "net")

    assert rows == {"net": 2 * _OF_PARAMETRIZED}
    assert _is_exact(outcome)
    assert outcome.realised == 2 * _OF_PARAMETRIZED


def test_a_module_with_a_class_of_its_own_waits_for_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        _parametrized()

        rows, outcome = _release({})
    finally:
        gc.enable()

    assert rows == {"unreachable cycles": _OF_PARAMETRIZED}
    assert _is_exact(outcome)
    assert outcome.realised == _OF_PARAMETRIZED


def test_a_class_that_a_library_has_keeps_its_modules(library: types.ModuleType) -> None:
    net = _parametrized()
    library.__dict__["registry"] = [type(net)]
    names = {"net": net}
    del net

    rows, outcome = _release(names, "net")

    assert rows["net"] == 0
    assert _is_exact(outcome)
    assert outcome.realised == 0


def test_a_jagged_tensor_is_not_asked_for_its_size() -> None:
    """It would note the answer in itself."""
    names = {"ragged": torch.nested.nested_tensor([torch.ones(500), torch.ones(600)], layout=torch.jagged)}

    scanned = scan(Notebook(shell=None, namespace=names)).facts

    assert "_sym_sizes_capsule" not in vars(names["ragged"])
    assert [root.what for root in scanned.graph.roots if root.label == "ragged"] == ["NestedTensor nested of 2 float32"]


def test_a_logger_belongs_to_logging() -> None:
    """Seed 3181 of the random notebooks: `%reset_gpu Keep handler log ex` promised 22,344 bytes and freed none."""
    handler = logging.Handler()
    handler.records = [torch.ones(50_000)]  # type: ignore[attr-defined]
    log = logging.getLogger("nbguard.test_other_holders")
    log.addHandler(handler)
    names = {"log": log, "handler": handler}
    del handler, log
    try:
        rows, outcome = _release(names, "log", "handler")

        assert _is_exact(outcome)
        assert outcome.realised == 0
        assert rows["log"] == rows["handler"] == 0
    finally:
        logging.getLogger("nbguard.test_other_holders").handlers.clear()


def test_nobody_looks_for_other_holders_of_what_is_in_use(library: types.ModuleType) -> None:
    """`pytest --gpu-leaks` walked all of pytest for the value of a fixture: 2 s of processor time with a thousand tests."""
    names = {"net": Box(data=torch.ones(50_000)), "kept": Box(data=torch.ones(50_000))}
    library.__dict__["registry"] = [names["net"]]
    library.__dict__["cache"] = [names["kept"]]

    facts = scan(Notebook(shell=None, namespace=names, in_use={"net"})).facts

    assert {root.label for root in facts.graph.roots} == {"net", "kept", "library_of_this_test.cache"}


@pytest.mark.parametrize("has_name", [False, True])
def test_a_registry_that_a_class_has_is_the_classes_alone(library: types.ModuleType, has_name: bool) -> None:
    """As `logging.Logger.manager`, to which the logger of each of a hundred modules refers, too."""

    class Logger:
        manager: Any

    Logger.__module__, Logger.__qualname__ = library.__name__, "Logger"
    library.__dict__["Logger"] = Logger
    registry = Logger.manager = Box(loggers={})
    for name in ("train", "first", "second"):
        registry.loggers[name] = logger = Logger()
        logger.manager = registry
        if name != "train":
            library.__dict__[name] = logger
    train = registry.loggers["train"]
    train.data = torch.ones(50_000)
    names = {"log": train} if has_name else {}
    del logger, train, registry, Logger

    facts = scan(Notebook(shell=None, namespace=names)).facts

    assert [root.label for root in facts.graph.roots] == [*names, "library_of_this_test.Logger"]


def test_what_waits_for_the_collector_holds_nothing_of_a_names() -> None:
    """A dead cycle of objects that themselves hold no memory refers to an object with a name."""
    names = {"kept": Box(data=torch.ones(50_000))}
    gc.collect()
    gc.disable()
    try:
        cycle = Box(kept=names["kept"])
        cycle.__dict__["itself"] = cycle
        del cycle

        rows, outcome = _release(names, "kept")
    finally:
        gc.enable()

    assert rows["kept"] == _BYTES
    assert _is_exact(outcome)
    assert outcome.realised == _BYTES


class _Loader(pickle.Unpickler):
    """An unpickler that is a cycle once it has been used: what it has found refers back to it, and is in its memo."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name != "_load_from_bytes":
            return found
        return lambda data: (self, found(data))[1]


def test_a_holder_without_names_that_both_searches_meet_is_no_holder_of_the_users() -> None:
    gc.disable()
    try:
        names = {"net": _Loader(io.BytesIO(pickle.dumps(torch.nn.Linear(250, 200)))).load()}
        labels = {root.label for root in scan(Notebook(shell=None, namespace=names)).facts.graph.roots}
        _, outcome = _release(names, "net")
    finally:
        gc.enable()

    assert labels == {"net", "unreachable cycles"}
    assert _is_exact(outcome)
    assert outcome.realised == _BYTES + 4 * 200


def test_garbage_that_refers_twice_to_a_holder_of_a_named_tensor_is_its_only_holder() -> None:
    """The first search meets the garbage, by its own tensor; the second the holder, and counts both references to it."""
    gc.collect()
    gc.disable()
    try:
        names = {"kept": torch.ones(50_000)}
        holder = Box(data=names["kept"])
        cycle = Box(tensor=torch.ones(50_000), first=holder, second=holder)
        cycle.__dict__["itself"] = cycle
        del holder, cycle

        rows, outcome = _release(names, "kept")
    finally:
        gc.enable()

    assert _is_exact(outcome)
    assert outcome.realised == 2 * _BYTES
    assert rows == {"kept": _BYTES, "unreachable cycles": _BYTES}


def test_records_of_an_array_are_the_arrays_own() -> None:
    table = numpy.array([(1, Box(data=torch.ones(50_000)))], dtype=[("n", int), ("obj", object)])
    names = {"table": table}
    del table

    rows, outcome = _release(names, "table")

    assert rows["table"] == outcome.realised == _BYTES
    assert _is_exact(outcome)


_JAGGED = "nested = torch.nested.nested_tensor([torch.randn(100, 64), torch.randn(300, 64)], layout=torch.jagged"


@pytest.mark.parametrize(
    ("cell", "nbytes"),
    [
        (_JAGGED + ")", 102_424),
        (_JAGGED + ", requires_grad=True)", 102_424),
        (_JAGGED + ").clone()", 102_424),
        ("nested = torch.nested.nested_tensor_from_jagged(torch.ones(9, 64), torch.tensor([0, 9]), max_seqlen=9)", 2320),
    ],
)
def test_a_jagged_tensor_is_promised_with_its_values_and_offsets(cell: str, nbytes: int) -> None:
    """C++ keeps both of them as well, to compute the view again."""
    names: dict[str, Any] = {"torch": torch}
    exec(cell, names)
    _, outcome = _release(names, "nested")

    assert (outcome.plan.promised, outcome.realised) == (nbytes, nbytes)


def test_values_that_a_name_shares_with_a_jagged_tensor_stay() -> None:
    names: dict[str, Any] = {"values": torch.randn(400, 64), "offsets": torch.tensor([0, 100, 400])}
    names["nested"] = torch.nested.nested_tensor_from_jagged(names["values"], names["offsets"])
    _, outcome = _release(names, "nested")

    assert (outcome.plan.promised, outcome.realised) == (0, 0)
    assert names["values"].shape == (400, 64)


_SCRIPTED = """
scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()))
scripted(torch.ones(2, 64)).sum().backward()
del scripted
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_what_only_a_class_made_in_a_function_holds_waits_for_the_collector() -> None:
    """`torch.jit.script` makes a class whose method knows the caller's names; the class refers to itself alone."""
    names: dict[str, Any] = {"torch": torch}
    gc.collect()
    gc.disable()
    try:
        exec(_SCRIPTED, names)
        rows, outcome = _release(names)
    finally:
        gc.enable()

    assert not any("_jit_internal" in label for label in rows)
    assert outcome.plan.promised == outcome.realised >= 4 * 64 * 65


class _Failing(torch.autograd.Function):
    """Fails in its backward pass, while other operations wait in the queue."""

    @staticmethod
    def forward(_: Any, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return given * 1

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError


def _failed_backward() -> None:
    other = torch.randn(50_000, requires_grad=True) * 2
    failing = _Failing.apply(torch.randn(50_000, requires_grad=True))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError):
        (failing + other.exp()).sum().backward()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_backward_pass_that_failed_is_forgotten_with_its_error(is_known: bool) -> None:
    """PyTorch keeps the operations that were to come until the next one begins, and with them a leaf and its values."""
    gc.disable()
    try:
        _failed_backward()
        if not is_known:
            gc.collect()  # the error and its frames
        facts = scan(Notebook(shell=None, namespace={})).facts
        _, outcome = _release({})
    finally:
        gc.enable()

    if not is_known:
        (number,) = (number for number, root in enumerate(facts.graph.roots) if root.label == "libraries (Tensor)")
        assert "next backward pass" in release_of_root(facts, facts.graph.roots[number]).effect
    assert outcome.plan.promised == outcome.realised
    assert outcome.realised + outcome.extra >= _BYTES
    assert not any(row.retained >= _BYTES for row in holders(scan(Notebook(shell=None, namespace={})).facts.graph))
