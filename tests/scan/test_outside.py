"""What the last error's frames share with code that is yet to run stays, whoever holds that code."""

from __future__ import annotations

import atexit
import gc
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import nbguard
from nbguard.memory.core.references.holders import holders
from nbguard.memory.scan.outside import region, unreached
from nbguard.memory.scan.scan import Notebook, scan

pytestmark = pytest.mark.usefixtures("frozen_libraries")

Use = Callable[..., Any]


class _Library(types.ModuleType):
    """A module that is no file of the user's: what its globals hold, no name of the user's leads to."""

    def __init__(self) -> None:
        super().__init__("library_of_this_test")
        self.held: list[Any] = []
        self.undo: list[Callable[[], Any]] = []

    def hold(self, thing: Any, undo: Callable[[], Any] = lambda: None) -> Any:
        self.held.append(thing)
        self.undo.append(undo)
        return thing


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Library]:
    gc.collect()
    library = _Library()
    monkeypatch.setitem(sys.modules, library.__name__, library)
    yield library
    for undo in library.undo:
        undo()
    for name in ("last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)


def _timer(library: _Library, use: Use) -> None:
    timer = threading.Timer(600, use)
    timer.daemon = True
    timer.start()
    library.undo.append(timer.cancel)


def _generator(library: _Library, use: Use) -> None:
    def generate() -> Iterator[Any]:
        yield None
        yield use()

    next(library.hold(generate()))


def _tensor_hook(library: _Library, use: Use) -> None:
    doubled = torch.ones(3, requires_grad=True) * 2
    doubled.register_hook(lambda _: use() and None)
    library.hold(doubled.sum())


def _atexit(library: _Library, use: Use) -> None:
    atexit.register(use)
    library.undo.append(lambda: atexit.unregister(use))


WAYS: dict[str, Callable[[_Library, Use], Any]] = {
    "a timer that runs": _timer,
    "a suspended generator": _generator,
    "a hook in a graph": _tensor_hook,
    "atexit": _atexit,
    "a weak reference's callback": lambda library, use: library.hold(weakref.ref(library, use)),
}


def _fail(register: Callable[[Use], Any], seen: list[float]) -> weakref.ref[Any]:
    """Fail in a function whose variables a registered function shares; leave the last error as Python would."""

    def run() -> None:
        shared, own = torch.ones(50_000), torch.ones(20_000)

        def use(*_: Any) -> None:
            seen.append(float(shared.sum()))

        known.append(weakref.ref(use))
        register(use)
        raise RuntimeError(own.shape)

    known: list[weakref.ref[Any]] = []
    try:
        run()
    except RuntimeError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    return known[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_that_the_last_error_shares_with_code_that_is_yet_to_run_stays(way: str, library: _Library) -> None:
    seen: list[float] = []
    use = _fail(lambda use: WAYS[way](library, use), seen)

    outcome = nbguard.release(namespace={})

    found = use()
    assert found is not None
    found()
    assert seen == [50_000.0]
    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)
    assert outcome.realised >= 4 * 20_000


@pytest.mark.usefixtures("library")
def test_what_a_release_leaves_in_the_last_error_goes_with_the_error() -> None:
    """On Python 3.14 a frame that is cleared and set again keeps its variables for good."""

    def run(kept: Any, also: Any) -> None:
        data = torch.ones(50_000)

        def use() -> Any:
            return also

        raise RuntimeError(kept, use, data.shape)

    class Kept: ...

    kept = [Kept(), Kept()]
    known = [weakref.ref(each) for each in kept]
    try:
        run(*kept)
    except RuntimeError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    del kept

    outcome = nbguard.release(namespace={})

    assert outcome.realised == outcome.plan.promised >= 4 * 50_000
    assert sys.last_traceback is not None
    assert sys.last_traceback.tb_next is not None
    variables = dict(sys.last_traceback.tb_next.tb_frame.f_locals)
    assert [type(variables[name]).__name__ for name in ("kept", "also", "use")] == ["Kept", "Kept", "function"]
    del variables, sys.last_type, sys.last_value, sys.last_traceback
    gc.collect()
    assert [each() for each in known] == [None, None]


@pytest.mark.usefixtures("library")
def test_a_variable_that_only_the_last_error_shares_goes() -> None:
    _fail(lambda _: None, [])

    outcome = nbguard.release(namespace={})

    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)
    assert outcome.realised >= 4 * 70_000


@pytest.mark.usefixtures("library")
def test_what_an_object_array_of_the_last_error_has_goes() -> None:
    def run() -> None:
        table = numpy.empty((2, 2), dtype=object)
        table[0, 0], table[1, 1] = torch.ones(10_000), [torch.ones(20_000)]
        raise RuntimeError(table.shape)

    try:
        run()
    except RuntimeError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    outcome = nbguard.release(namespace={})

    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)
    assert outcome.realised >= 4 * 30_000


def _fail_in_a_function_of_its_own(name: str) -> weakref.ref[Any]:
    def step(*, kept: torch.Tensor = torch.ones(30_000)) -> None:  # noqa: B008
        raise RuntimeError

    step.wrapped = torch.ones(60_000)  # type: ignore[attr-defined]
    sys.modules["library_of_this_test"].__dict__[name] = step
    try:
        step()
    except RuntimeError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    return weakref.ref(step)


def test_what_a_function_keeps_that_only_finished_frames_keep_goes(library: _Library) -> None:
    _fail_in_a_function_of_its_own("step")
    del library.step  # type: ignore[attr-defined]

    outcome = nbguard.release(namespace={})

    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)
    assert outcome.realised >= 4 * 90_000


def test_what_a_function_keeps_stays_while_a_library_has_it(library: _Library) -> None:
    step = _fail_in_a_function_of_its_own("step")

    outcome = nbguard.release(namespace={})

    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)
    assert (step().__kwdefaults__["kept"].shape, step().wrapped.shape) == ((30_000,), (60_000,))  # type: ignore[union-attr]


def test_a_module_and_a_weak_reference_of_the_users_are_looked_into(library: _Library) -> None:
    box: Any = types.ModuleType("box")
    box.t, told = torch.ones(10), torch.ones(20)
    names = {"box": box, "told": weakref.ref(library, lambda _, told=told: told)}
    del box, told

    rows = {row.label: row.retained for row in nbguard.report(names).devices[0].holders}

    assert (rows["box"], rows["told"]) == (40, 80)


def test_looking_at_what_runs_at_exit_runs_no_code_of_a_callable_object() -> None:
    """`atexit` compares what it has with what is to be unregistered: an `__eq__` of the user's must not run."""
    ran: list[object] = []

    class Callback:
        def __call__(self) -> None: ...

        def __eq__(self, other: object) -> bool:
            ran.append(other)
            return other is self

        __hash__ = None  # type: ignore[assignment]

    callback = Callback()

    data = torch.ones(50_000)

    def save() -> None:
        data.sum()

    atexit.register(save)
    atexit.register(callback)
    try:
        labels = [holder.label for holder in nbguard.report({}).devices[0].holders]
        assert ran == []
        assert sys.getprofile() is None
        assert any("atexit callback save" in label for label in labels)
    finally:
        atexit.unregister(callback)
        atexit.unregister(save)


@pytest.mark.parametrize("is_tied", [False, True], ids=["chains", "cycles"])
def test_the_way_below_is_walked_as_often_for_many_objects_of_a_library_as_for_few(
    is_tied: bool, library: _Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was walked once for each object: a look at a process in which a library held 5,000 tensors took 15 seconds."""

    def walks(count: int) -> int:
        kept: list[Any] = [[torch.ones(8)] for _ in range(count)]
        if is_tied:
            for each in kept:
                each.append(each)
        library.kept = [itertools.repeat(each) for each in kept]
        del kept
        calls: list[int] = []
        with monkeypatch.context() as patch:
            for module in (region, unreached):
                patch.setattr(module, "below", lambda *args: (calls.append(1), below(*args))[1])
            nbguard.report({})
        library.kept = None
        return len(calls)

    below = region.below
    assert walks(8) > 0
    assert walks(400) <= walks(40) + 4
    gc.collect()  # cycles of tensors would be the next test's garbage


@pytest.mark.parametrize("most", [12_000_000, 1])
def test_in_a_heap_of_millions_holders_are_followed_less_far_and_nothing_else_changes(
    most: int, library: _Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 3 million objects each step upwards took a second, and up to 48 were taken."""
    gc.collect()
    library.kept = [torch.ones(50_000)]
    for _ in range(3):
        library.kept = [itertools.repeat(library.kept), itertools.repeat(library.kept)]
    monkeypatch.setattr("nbguard.memory.scan.outside.region._FEWEST_PASSES", 1)
    monkeypatch.setattr("nbguard.memory.scan.outside.region._MOST_OBJECTS", most)

    rows = {row.label: row.retained for row in holders(scan(Notebook(shell=None, namespace={})).facts.graph)}

    assert {label: nbytes for label, nbytes in rows.items() if nbytes >= 200_000} == {
        "library_of_this_test.kept" if most > 1 else "libraries (list)": 200_000
    }


_WEIGHT = "w = torch.randn(512, 5, requires_grad=True)"
OF_A_LIBRARY = {
    "a tensor that a graph saved": (f"{_WEIGHT}; y = library.x @ w", ("y",)),
    "a tensor that two graphs saved": (f"{_WEIGHT}; y, z = library.x @ w, library.x @ w", ("y", "z")),
    "the base of a view": ("y = library.x[None]", ("y",)),
    "the base of two views": ("y, z = library.x[None], library.x[1:]", ("y", "z")),
    "the base of a view that a graph saved": (f"{_WEIGHT}; y = library.x[None] @ w", ("y",)),
    "an element of a list": (f"{_WEIGHT}; y = library.list[0] @ w", ("y",)),
    "parameters that a graph leads to": ("y = library.model(torch.randn(64, 512))", ("y",)),
    "parameters and the input that a graph saved": ("y = library.model(library.x)", ("y",)),
    "a gradient": ("library.model(library.x).sum().backward(); g = library.model[0].weight.grad", ("g",)),
}


_SHOWS_CHANGED = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this PyTorch does not show what was changed in place"
)


@_SHOWS_CHANGED
@pytest.mark.parametrize(("code", "names"), OF_A_LIBRARY.values(), ids=OF_A_LIBRARY)
def test_memory_that_a_library_has_is_not_promised_with_a_graph_or_a_view_of_it(
    code: str, names: tuple[str, ...], library: _Library
) -> None:
    """C++'s references, which are none of Python's, hid the library's own."""
    library.x, library.list = torch.randn(64, 512), [torch.randn(64, 512)]
    library.model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 5))
    space: dict[str, Any] = {"torch": torch}
    exec(code, {"torch": torch, "library": library}, space)
    gc.collect()
    outcome = nbguard.release(*names, namespace=space)

    assert outcome.realised == outcome.plan.promised
    assert outcome.extra == 0


def test_tensors_that_hooks_packed_for_a_graph_go_with_it() -> None:
    """C++ holds such a tensor as it holds any object of Python's."""
    first, second = (torch.randn(512, 512, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        y = first @ second
    space: dict[str, Any] = {"first": first, "second": second, "y": y}
    del first, second, y
    gc.collect()
    outcome = nbguard.release("first", "second", "y", namespace=space)

    assert outcome.realised == outcome.plan.promised == 5 * 2**20
    assert outcome.extra == 0


_AT_WORK = "m = torch.nn.Sequential({}); opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9); z = m({})"
TRAINED_SINCE = {
    "a convolution": ("torch.nn.Conv2d(64, 64, 3)", "torch.randn(2, 64, 8, 8)"),
    "a transposed weight": ("torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)", "torch.randn(2, 300)"),
    "norms": ("torch.nn.Linear(300, 300), torch.nn.LayerNorm(300), torch.nn.PReLU(300)", "torch.randn(2, 300)"),
    "attention": ("torch.nn.TransformerEncoderLayer(200, 4)", "torch.randn(5, 2, 200)"),
    "an embedding": ("torch.nn.Embedding(100, 300), torch.nn.Linear(300, 300)", "torch.ones(4, dtype=torch.long)"),
}


@_SHOWS_CHANGED
@pytest.mark.parametrize("names", [("m",), ("z", "m", "opt")], ids=["the model", "all"])
@pytest.mark.parametrize(("model", "data"), TRAINED_SINCE.values(), ids=TRAINED_SINCE)
def test_a_graph_is_no_library_once_an_optimizer_has_changed_what_it_saved(
    model: str, data: str, names: tuple[str, ...]
) -> None:
    """PyTorch refuses to unpack such a tensor, also where an earlier scan did."""
    space: dict[str, Any] = {"torch": torch}
    exec(_AT_WORK.format(model, data), space)
    scan(Notebook(shell=None, namespace=space))
    exec(f"y = m({data}).sum(); y.backward(); opt.step(); opt.zero_grad(); del y", space)
    del space["torch"], space["__builtins__"]
    gc.collect()
    rows = [row.label for row in holders(scan(Notebook(shell=None, namespace=space)).facts.graph)]
    outcome = nbguard.release(*names, namespace=space)

    assert not [label for label in rows if "libraries" in label]
    assert outcome.realised == outcome.plan.promised
    assert outcome.extra == 0


def test_a_graph_is_no_library_where_torch_shows_nothing_that_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.4: a library's reference is not told from the graph's there."""
    for name in ("data", "unpack_hook"):
        monkeypatch.delattr(torch._C._autograd.SavedTensor, name, raising=False)
    test_a_graph_is_no_library_once_an_optimizer_has_changed_what_it_saved(*TRAINED_SINCE["a convolution"], ("z", "m", "opt"))


@_SHOWS_CHANGED
def test_what_is_no_saved_tensor_of_a_graph_is_a_librarys_also_once_it_was_changed(library: _Library) -> None:
    space: dict[str, Any] = {"torch": torch}
    exec(_AT_WORK.format("torch.nn.Conv2d(64, 64, 3)", "torch.randn(2, 64, 8, 8)"), space)
    exec("m(torch.randn(2, 64, 8, 8)).sum().backward(); opt.step(); opt.zero_grad()", space)
    library.weight = space["m"][0].weight
    del space["torch"], space["__builtins__"]
    gc.collect()
    outcome = nbguard.release("z", "m", "opt", namespace=space)

    assert library.weight.untyped_storage().nbytes() > 100_000
    assert outcome.realised == outcome.plan.promised
    assert outcome.extra == 0


@pytest.mark.usefixtures("library")
def test_the_graph_of_a_backward_pass_that_failed_goes_with_its_frames() -> None:
    """PyTorch keeps the nodes that were to come in a queue of the thread."""
    space: dict[str, Any] = {"torch": torch}
    exec(_AT_WORK.format("torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)", "torch.randn(2, 300)"), space)
    code = "m(torch.randn(2, 300)).sum().backward(); tot = sum(m(torch.randn(64, 300)).mean() for _ in range(4)); opt.step()"
    exec(code, space)
    try:
        exec("tot.backward()", space)
    except RuntimeError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    del space["torch"], space["__builtins__"]
    outcome = nbguard.release("tot", "z", "m", "opt", namespace=space)

    assert outcome.realised == outcome.plan.promised > 700_000
    assert not outcome.survivors
