"""A target that frees nothing is not deleted: the plan names what keeps its memory, and the command that frees both."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.memory.cleanup.plan.plan import Outcome, Plan

pytestmark = pytest.mark.usefixtures("frozen_libraries")

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Code that binds names, what is to be released of it, what keeps that, and the command's targets."""

    code: str
    targets: tuple[str, ...]
    keepers: dict[str, str]  # how each keeps it
    command: tuple[str, ...] = ()
    frees: int = 0
    kept: tuple[str, ...] = field(default=())  # of the targets; all, if not given


CASES = {
    "alias": Case(code="x = ones(4); best = x", targets=("x",), keepers={"best": "same"}, command=("x", "best"), frees=4 * MIB),
    "two aliases": Case(
        code="x = y = best = ones(4)", targets=("x", "y"), keepers={"best": "same"}, command=("x", "y", "best"), frees=4 * MIB
    ),
    "view": Case(
        code="x = ones(4); row = x[3:]", targets=("x",), keepers={"row": "shares"}, command=("x", "row"), frees=4 * MIB
    ),
    "of a view": Case(
        code="x = ones(4); row = x[3:]", targets=("row",), keepers={"x": "shares"}, command=("row", "x"), frees=4 * MIB
    ),
    "array": Case(
        code="x = ones(4); a = x.numpy()", targets=("x",), keepers={"a": "shares"}, command=("x", "a"), frees=4 * MIB
    ),
    "key of a dict": Case(
        code="d = {'a': ones(4), 'b': ones(1)}; x = d['a']",
        targets=("d['a']",),
        keepers={"x": "same"},
        command=("d['a']", "x"),
        frees=4 * MIB,
    ),
    "kept by a key": Case(
        code="d = {'a': ones(4), 'b': ones(1), 'lr': 0.1}; x = d['a']",
        targets=("x",),
        keepers={"d['a']": "same"},
        command=("x", "d['a']"),
        frees=4 * MIB,
    ),
    "element of two lists": Case(
        code="a = [ones(4), ones(1)]; b = [7, a[0]]",
        targets=("a[0]",),
        keepers={"b[1]": "same"},
        command=("a[0]", "b[1]"),
        frees=4 * MIB,
    ),
    "elements of one list": Case(
        code="x, y = ones(4), ones(4); z = [x, y]; l = [ones(1), z, x]",
        targets=("z",),
        keepers={"x": "shares", "y": "shares", "l[1]": "same", "l[2]": "shares"},
        command=("z", "x", "y", "l[1]", "l[2]"),
        frees=8 * MIB,
    ),
    "held twice by a list": Case(
        code="l = [ones(4)] * 2", targets=("l[0]",), keepers={"l": "shares"}, command=("l[0]", "l"), frees=4 * MIB
    ),
    "kept twice by a list": Case(
        code="x = ones(4); l = [x, x, ones(1)]", targets=("x",), keepers={"l[0]": "same"}, command=("x", "l"), frees=5 * MIB
    ),
    "part and whole": Case(
        code="x = ones(4); t = (x[3:], [x, ones(1)])",
        targets=("x",),
        keepers={"t[1][0]": "same", "t": "shares"},
        command=("x", "t"),
        frees=5 * MIB,
    ),
    "attribute": Case(
        code="class Exp: pass\nexp = Exp(); exp.x = ones(4); exp.y = ones(1); x = exp.x",
        targets=("exp.x",),
        keepers={"x": "same"},
        command=("exp.x", "x"),
        frees=4 * MIB,
    ),
    "kept by an attribute": Case(
        code="class Exp: pass\nexp = Exp(); exp.x = ones(4); exp.y = ones(1); x = exp.x",
        targets=("x",),
        keepers={"exp.x": "same"},
        command=("x", "exp.x"),
        frees=4 * MIB,
    ),
    "tuple": Case(code="x = ones(4); t = (x, 5)", targets=("x",), keepers={"t[0]": "same"}, command=("x", "t"), frees=4 * MIB),
    "graph": Case(
        code="m = nn.Linear(512, 512, bias=False); out = [m(torch.ones(1, 512)).sum()]",
        targets=("m",),
        keepers={"out[0]": "graph"},
        command=("m", "out[0]"),
        frees=MIB + 4 + 2048,
    ),
    "many graphs": Case(
        code="m = nn.Linear(512, 512, bias=False); out = [m(torch.ones(1, 512)).sum() for _ in range(30)]",
        targets=("m",),
        keepers={"out": "graph"},
        command=("m", "out"),
        frees=MIB + 30 * (4 + 2048),
    ),
    "optimizer": Case(
        code="m = nn.Linear(512, 512); opt = torch.optim.SGD(m.parameters(), lr=0.1)",
        targets=("m",),
        keepers={"opt": "shares"},
        command=("m", "opt"),
        frees=MIB + 2048,
    ),
    "optimizer of a live model": Case(
        code="m = nn.Linear(512, 512); opt = torch.optim.SGD(m.parameters(), lr=0.1)", targets=("opt",), keepers={"m": "needs"}
    ),
    "parameters": Case(
        code="m = nn.Linear(512, 512); parts = list(m.parameters())", targets=("parts",), keepers={"m": "needs"}
    ),
    "part of a model": Case(
        code="m = nn.Sequential(nn.Linear(512, 512)); body = m[0]", targets=("body",), keepers={"m": "needs"}
    ),
    "tied to another model": Case(
        code="a, b = nn.Linear(512, 512, bias=False), nn.Linear(512, 512); b.weight = a.weight",
        targets=("a",),
        keepers={"b": "needs"},
    ),
    "model in a list": Case(
        code="m = nn.Linear(512, 512); runs = [nn.Linear(4, 4), m]",
        targets=("m",),
        keepers={"runs[1]": "same"},
        command=("m", "runs[1]"),
        frees=MIB + 2048,
    ),
    "bound method": Case(
        code="m = nn.Linear(512, 512); call = m.forward",
        targets=("m",),
        keepers={"call.__self__": "same"},
        command=("m", "call"),
        frees=MIB + 2048,
    ),
    "default of a function": Case(code="x = ones(4)\ndef f(y=x): return y", targets=("x",), keepers={"f": "needs"}),
    "closure": Case(
        code="def make(y):\n    def f(): return y\n    return f\nx = ones(4); f = make(x)",
        targets=("x",),
        keepers={"f": "needs"},
    ),
    "loader": Case(
        code="x = ones(4); dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x))",
        targets=("x",),
        keepers={"dl.dataset.tensors[0]": "same"},
        command=("x", "dl"),
        frees=4 * MIB,
    ),
    "beside one that goes": Case(
        code="x = best = ones(4); y = ones(1)",
        targets=("x", "y"),
        kept=("x",),
        keepers={"best": "same"},
        command=("x", "best"),
        frees=4 * MIB,
    ),
    "partly a model's": Case(
        code="m = nn.Linear(512, 512, bias=False); x = ones(4); l = [m.weight, x]",
        targets=("l",),
        keepers={"m": "needs", "x": "shares"},
        command=("l", "x"),
        frees=4 * MIB,
    ),
}


_CACHED = "import functools\n@functools.lru_cache\ndef f(m): return m.weight if isinstance(m, nn.Module) else None\n"
CACHED = {
    "argument": Case(code="x = ones(4); f(x)", targets=("x",), keepers={"f": "cache"}, command=("x",), frees=4 * MIB),
    "beside a name": Case(
        code="x = best = ones(4); f(x)",
        targets=("x",),
        keepers={"f": "cache", "best": "same"},
        command=("x", "best"),
        frees=4 * MIB,
    ),
    "in a list": Case(
        code="x = ones(4); fs = [functools.lru_cache(lambda t, n=n: n) for n in range(4)]; any(f(x) for f in fs[:1] + fs[2:3])",
        targets=("x",),
        keepers={"fs[0]": "cache", "fs[2]": "cache"},
        command=("x",),
        frees=4 * MIB,
    ),
    "result that a model needs": Case(
        code="x = nn.Linear(512, 512); w = f(x)", targets=("w",), keepers={"f": "cache", "x": "needs"}
    ),
    "what the function needs": Case(
        code="x = ones(4); g = functools.lru_cache(lambda t, y=x: 1); g(x)",
        targets=("x",),
        keepers={"g": "cache", "g.__wrapped__": "needs"},
    ),
}


def _names(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch, "nn": nn, "ones": lambda n: torch.ones(n * MIB // 4)}
    exec(code, names)
    return names


def _outcome(names: dict[str, Any], *targets: str) -> Outcome:
    gc.collect()
    outcome = nbguard.release(*targets, namespace=names)
    assert outcome.realised == outcome.plan.promised
    assert not outcome.undone
    return outcome


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_target_that_frees_nothing_stays_and_its_command_frees_what_it_says(case: Case) -> None:
    names = _names(case.code)
    before = {*names}

    outcome = _outcome(names, *case.targets)

    kept = case.kept or case.targets
    assert names.keys() == before - {*case.targets}.difference(kept)
    (told,) = outcome.plan.kept
    assert told.names == kept
    assert {keeper.path: keeper.how for keeper in told.keepers} == case.keepers
    assert (told.advice.targets, told.advice.frees or 0) == (case.command, case.frees)
    assert f"{kept[0]} " in str(outcome)
    if case.command:
        assert _outcome(names, *case.command).realised == case.frees
        assert not names.keys() & {*case.command}


@pytest.mark.parametrize("case", CACHED.values(), ids=CACHED)
def test_a_cache_that_keeps_a_target_is_emptied_and_its_function_stays(case: Case) -> None:
    names = _names(_CACHED + case.code)
    before = {*names}

    (told,) = _outcome(names, *case.targets).plan.kept

    assert names.keys() == before
    assert {keeper.path: keeper.how for keeper in told.keepers} == case.keepers
    assert (told.advice.targets, told.advice.frees or 0) == (case.command, case.frees)
    assert told.advice.command.endswith("--caches" if case.command else "")
    if case.command:
        outcome = nbguard.release(*case.command, caches=True, namespace=names)
        assert outcome.realised == outcome.plan.promised == case.frees
        assert names.keys() == before - {*case.command}


def test_a_part_of_the_bytes_is_what_was_asked_for() -> None:
    names = _names("x, y = ones(4), ones(1); l = [x, y]; del y")

    outcome = _outcome(names, "l")

    assert "l" not in names
    assert (outcome.realised, outcome.plan.kept) == (MIB, ())


def test_a_model_and_its_optimizer_go_together_though_neither_frees_anything_alone() -> None:
    names = _names("m = nn.Linear(512, 512); opt = torch.optim.SGD(m.parameters(), lr=0.1)")

    assert not _outcome(names, "m").plan.promised
    assert not _outcome(names, "opt").plan.promised
    assert _outcome(names, "m", "opt").realised == MIB + 2048


def test_a_dry_run_names_the_targets_that_have_to_go_as_well() -> None:
    """`y` goes by the plan; printed before that, the command says so too."""
    names = _names("x = best = ones(4); y = [x, ones(1)]")

    plan = nbguard.plan("x", "y", namespace=names)

    assert isinstance(plan, Plan)
    (told,) = plan.kept
    assert (told.advice.targets, told.advice.frees) == (("x", "best"), 4 * MIB)
    assert (told.instead.targets, told.instead.frees) == (("y", "x", "best"), 5 * MIB)
    assert _outcome(names, "y", "x", "best").realised == 5 * MIB


def test_elements_of_a_list_are_those_that_were_meant() -> None:
    names = _names("l = [ones(1) * n for n in range(6)]; d = {'l': l}")

    _outcome(names, "l[0]", "d['l'][2]", "l[-1]", "l[0]")

    assert [int(t[0]) for t in names["l"]] == [1, 3, 4]


def test_a_part_goes_before_the_whole() -> None:
    names = _names("runs = {'a': [ones(1)]}")

    assert _outcome(names, "runs", "runs['a']", "runs['a'][0]").realised == MIB
    assert "runs" not in names


def test_what_has_no_memory_is_left_as_it_is() -> None:
    names = _names("loss = nn.MSELoss(); n = 5; x = ones(1)")

    outcome = _outcome(names, "loss", "n", "x")

    assert {"loss", "n"} <= names.keys()
    assert len(outcome.plan.skipped) == 2
