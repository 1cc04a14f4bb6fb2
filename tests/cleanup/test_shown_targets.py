"""Each path that a report shows is a target: it is accepted, and its reference goes and nothing else."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.errors import TargetError
from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.references.explain import explain_root
from nbguard.memory.scan import scan as looking
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.shown_targets import targets_of, with_hooks

pytestmark = pytest.mark.usefixtures("frozen_libraries")

MIB = 1024**2

_LIBRARY = """
class State:
    _shared_state = {}
    def __init__(self): self.__dict__ = self._shared_state
class Registry:
    items, table, slots = [], {}, set()
class Slotted:
    __slots__ = ('kept', '__weakref__')
HOOKS, MADE = [], Slotted()
def observe(callback): HOOKS.append(callback)
"""


@pytest.fixture
def library() -> Iterator[Any]:
    """A module that counts as a library's, which keeps things in every way that Python has."""
    module = types.ModuleType("keepinglib")
    module.__file__ = torch.__file__
    exec(_LIBRARY, module.__dict__)
    sys.modules["keepinglib"] = module
    yield module
    del sys.modules["keepinglib"]


class Prefetcher:
    """Registers a finalizer that keeps it alive."""

    def __init__(self) -> None:
        self.buffers = [torch.empty(MIB) for _ in range(2)]
        self.final = weakref.finalize(self, self.close)

    def close(self) -> None:
        """Let the buffers go."""
        self.buffers.clear()


def _bytes(names: dict[str, Any], label: str) -> int:
    gc.collect()
    report = nbguard.report(names)
    return sum(holder.retained for holder in report.devices[0].holders if holder.label == label)


def _keep(library: Any, way: str) -> str:
    """Have the library keep a model in some way, and return the label of the root that a report shows."""
    model = nn.Linear(1000, 1000)
    match way:
        case "attribute of all instances":
            library.State().active = model
            return "keepinglib.State"
        case "list of a class":
            library.Registry.items.append(model)
        case "dict of a class":
            library.Registry.table["a"] = model
        case "attribute of a class":
            library.Registry.model = model
        case "slot":
            library.MADE.kept = model
            return "keepinglib.MADE"
        case "hook":
            library.observe(lambda: model)
            return "keepinglib.HOOKS"
        case "finalizer":
            Prefetcher()
            return "weakref.finalize"
    return "keepinglib.Registry"


def test_words_that_make_up_a_path_are_one_target(library: Any) -> None:
    _keep(library, "hook")
    names: dict[str, Any] = {"x": torch.ones(MIB)}

    plan = nbguard.plan("keepinglib.HOOKS[0]", "→", "closure", "model", "x", namespace=names)

    assert [target.text for target in plan.request.targets] == ["keepinglib.HOOKS[0] → closure model", "x"]
    library.HOOKS.clear()


@pytest.mark.parametrize("text", ["nowhere", "keepinglib.HOOKS[9]", "keepinglib.nothing → x", "1 +"])
def test_what_is_neither_a_name_nor_shown_is_one_line(library: Any, text: str) -> None:
    with pytest.raises(TargetError):
        nbguard.plan(text, namespace={})


def test_a_cleanup_looks_at_the_heap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"x": torch.ones(MIB)}
    while nbguard.release(namespace=names).extra:  # what other tests have left to the collector
        pass
    looks, look = [], looking._scan_once
    monkeypatch.setattr(looking, "_scan_once", lambda *args: looks.append(args[0]) or look(*args))

    outcome = nbguard.release(namespace=names)
    once = len(looks)
    names["y"] = names["x"].clone()
    nbguard.release("y", namespace=names)

    assert (once, len(looks)) == (1, 2), "weak references measure what has changed"
    assert [(left.label, left.nbytes, left.advice.command) for left in outcome.left[:1]] == [("x", 4 * MIB, "%reset_gpu x")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["attribute of all instances", "list of a class", "dict of a class", "attribute of a class", "slot", "hook", "finalizer"],
)
def test_what_a_library_keeps_goes_by_each_text_that_is_shown(
    library: Any, way: str, frozen_libraries: Callable[[], None]
) -> None:
    if way == "finalizer":
        frozen_libraries()  # shows `weakref.finalize` itself
    names: dict[str, Any] = {"live": nn.Linear(500, 500)}
    label = _keep(library, way)
    gc.collect()
    why = explain_root(scan(Notebook(shell=None, namespace=names)).facts, label)
    assert why is not None
    assert why.nbytes
    path = why.paths[0]

    assert nbguard.plan(path.text, namespace=names).promised > 0
    assert nbguard.plan(label, namespace=names).promised >= why.nbytes
    if path.advice.targets:
        outcome = nbguard.release(*path.advice.targets, namespace=names)
        assert outcome.realised == outcome.plan.promised == why.nbytes
    else:
        exec(path.advice.command, {})

    assert _bytes(names, label) == 0
    assert nbguard.report(names).devices[0].allocated == (500 * 500 + 500) * 4
    assert hasattr(library, "Registry")
    assert "_shared_state" in library.State.__dict__
    if way == "attribute of all instances":
        assert library.State().active is None  # whoever asks for it is told that there is none


def test_a_class_whose_label_is_shown_is_not_deleted(library: Any, frozen_libraries: Callable[[], None]) -> None:
    frozen_libraries()
    names: dict[str, Any] = {}
    _keep(library, "finalizer")

    nbguard.release("weakref.finalize", namespace=names)

    assert weakref.finalize.__name__ == "finalize"
    assert _bytes(names, "weakref.finalize") == 0


_HOOKED = """
import torch
from functools import partial
from torch import nn
feats, losses, unused, model = {}, [], {}, nn.Sequential(nn.Linear(4, 4))
def keep(key, value): feats[key] = value
def save(module, args, out): keep(module, out)
def save_first(first, module, args, out): losses.append(out)
model[0].register_forward_hook(save)
model.register_forward_hook(partial(save_first, 0))
unused['a'] = torch.ones(8)
out = model(torch.ones(2**16, 4))
del out
"""


def test_the_plan_says_which_hook_of_a_live_model_needs_the_name() -> None:
    """Its function uses the name, or one that it calls does; emptying frees as much, and the next pass goes on."""
    names: dict[str, Any] = {}
    exec(_HOOKED, names)
    notebook = Notebook(shell=None, namespace=names)

    def planned_for(*texts: str) -> Plan:
        scanned = scan(notebook)
        return plan_cleanup(scanned.facts, Request(targets=with_hooks(targets_of(texts, notebook), notebook, scanned.tracker)))

    def details(*texts: str) -> list[str]:
        plan = planned_for(*texts)
        assert len([action for action in plan.actions if action.kind == "del"]) == len(texts)
        return [action.detail for action in plan.actions if action.kind == "del"]

    feats, losses = details("feats", "losses")  # they hold one tensor
    assert feats.endswith(
        "the hook `save` of a Linear uses it and raises NameError at the next pass; `feats.clear()` frees its contents and "
        "keeps the name"
    )
    assert "the hook `save_first` of a Sequential uses it" in losses
    assert details("unused") == [""]
    assert not any("hook" in detail for detail in details("feats", "losses", "model"))
    planned = planned_for("feats", "losses").promised
    exec("feats.clear(); losses.clear()", names)
    assert planned >= 2**20
    assert not any(root.label in ("feats", "losses") for root in scan(notebook).facts.graph.roots)
    exec("model(torch.ones(1, 4))", names)


def test_a_cleanup_of_a_name_passes_over_the_heap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan knows the modules by then."""
    names: dict[str, Any] = {}
    exec(_HOOKED, names)
    passes, get_objects = [], gc.get_objects

    def counted(generation: int | None = None) -> list[Any]:
        passes.extend([1] if generation is None else [])
        return get_objects(generation)

    monkeypatch.setattr(gc, "get_objects", counted)
    plan = nbguard.plan("feats", "losses", namespace=names)

    assert "the hook `save` of a Linear" in next(action.detail for action in plan.actions if action.kind == "del")
    assert passes == [1]


class Output(dict[str, Any]):
    """As an output of transformers: an entry is an attribute, too, and none is deleted."""

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __delitem__(self, *args: object) -> None:
        raise RuntimeError(f"You cannot use ``__delitem__`` on a {type(self).__name__} instance.")


class Deletable(Output):
    """Its entries may be deleted; the attributes stay."""

    def __delitem__(self, key: str) -> None:  # type: ignore[override]
        dict.__delitem__(self, key)


def test_a_part_that_is_an_entry_and_an_attribute_is_promised_nothing() -> None:
    out, other, same = Output(), Deletable(), Deletable()
    out["logits"], other["logits"] = torch.ones(1024), torch.ones(1024)
    same.__dict__ = same
    same["logits"] = torch.ones(1024)
    notebook = Notebook(shell=None, namespace={"out": out, "other": other, "same": same})

    with pytest.raises(TargetError, match=r"cannot be deleted: Output does not allow it; the whole is freed by .*out"):
        targets_of(["out['logits']"], notebook)
    for text, is_known in (("out.logits", False), ("other['logits']", False), ("same['logits']", True)):
        (target,) = targets_of([text], notebook)
        assert target.is_known is is_known, text
        promised = plan_cleanup(scan(notebook).facts, Request(targets=(target,))).promised
        assert promised == (4096 if is_known else 0), text
