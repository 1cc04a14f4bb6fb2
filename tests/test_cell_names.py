"""The names of the notebook that code binds, deletes and reads: one answer for all who ask, checked by running the code."""

from __future__ import annotations

import contextlib
import sys

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nbguard.cell_names import cell_names
from nbguard.memory.cells.name_watch import _unbound_by
from nbguard.memory.scan.oom.names import names_in
from nbguard.memory.scan.roots.registries import Cells
from nbguard.training.prediction.cell import names_bound
from nbguard.training.runs.analysis.cell_seeds import cells_behind

_BINDS = [
    "x = 1",
    "x += 1",
    "x: int = 1",
    "(x, y), *z = (1, 2), 3, 4",
    "for x in [1]: pass",
    "for x, (y, z) in [(1, (2, 3))]: pass",
    "with open_one() as x: pass",
    "import os.path as x",
    "import os.path",
    "from os import path as x, sep",
    "def x(): y = 1",
    "async def x(): y = 1",
    "class x:\n    y = 1\n    def z(self): w = 1",
    "def f():\n    global x\n    x = 1\nf()",
    "def f():\n    def g():\n        global x\n        x = 1\n    x = 2\n    g()\nf()",
    "class A:\n    global x\n    x = 1",
    "class A:\n    def f(self):\n        global x\n        import os as x\nA().f()",
    "y = [x for x in [1]]",
    "y = {x: z for x in [1] for z in [x]}",
    "y = [w := x for x in [1]]",
    "y = [[w := x for x in [1]] for x in [1]]",
    "y = (lambda x: (z := x))(1)",
    "def f(x, *y, z=1, **w): return x\nf(1)",
    "def f(a=(x := 1)): pass",
    "@(y := lambda f: f)\ndef f(): pass",
    "if (x := 1): pass",
    "while (x := []): pass",
    "match [1, 2, 3]:\n    case [x, *y]: pass",
    "match {'a': 1, 'b': 2}:\n    case {'a': x, **y}: pass",
    "match 1:\n    case int() as x: pass",
    "a.b = 1; d[0] = 1",
    "try:\n    x = 1\nfinally:\n    y = 2",
    "f = lambda: (yield)",
    "y = (lambda: [x for x in [1]])()",
]


@pytest.mark.parametrize("source", _BINDS)
def test_a_cell_binds_what_it_has_bound_when_it_has_run(source: str) -> None:
    given = {"open_one": contextlib.nullcontext, "a": type("A", (), {})(), "d": {}, "x": 0}
    unset = object()
    namespace = {**given, "x": unset if source != "x += 1" else 0}
    exec(source, namespace)
    bound = {name for name, value in namespace.items() if value is not unset and value is not given.get(name, unset)}
    bound |= {"x"} if source == "x += 1" else set()

    names = cell_names(source)

    assert names is not None
    assert names.bound == bound - {"__builtins__", "__annotations__"}


@pytest.mark.parametrize(
    ("source", "bound", "deleted", "read"),
    [
        ("del x, y[0]", "", "x", "y"),
        ("try: f()\nexcept E as x: pass", "x", "x", "f E"),
        ("from m import *", "", "", ""),
        ("x = y", "x", "", "y"),
        ("x += y", "x", "", "x y"),
        ("def f(a, b=c):\n    d = a\n    return e(d)", "f", "", "c e"),
        ("class A(B):\n    x = 1\n    y = x\n    def f(self): return x", "A", "", "B x"),
        ("y = [x for x in x]", "y", "", "x"),
        ("y = [a for a in b if a in c]", "y", "", "b c"),
        ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n    return x", "f", "", ""),
        ("def f():\n    global x\n    return x", "f", "", "x"),
        ("def f():\n    global x\n    del x", "f", "x", ""),
        ("async with a as x:\n    async for y in z: pass", "x y", "", "a z"),
        ("x = await f(y)", "x", "", "f y"),
        ("f(x)(lambda y: y + z)", "", "", "f x z"),
    ],
)
def test_what_a_cell_deletes_and_reads(source: str, bound: str, deleted: str, read: str) -> None:
    names = cell_names(source)

    assert names is not None
    assert names.has_star == ("*" in source and "import" in source)
    assert [set(each) for each in (names.bound, names.deleted, names.read)] == [set(w.split()) for w in (bound, deleted, read)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has no `type` statement yet")
def test_a_type_statement_binds_its_name() -> None:
    names = cell_names("type x = int")
    assert names is not None
    assert names.bound == {"x"}


@pytest.mark.parametrize(
    ("typed", "bound"),
    [
        ("%time x = f()", "x"),
        ("%%time\nx = 1\ny = 2", "x y"),
        ("%%capture out\nx = 1", "x out"),
        ("%timeit x = 1", ""),
        ("%%bash\nx=1", ""),
        ("%%writefile a.py\nx = 1", ""),
        ("x = !ls\n!echo $y", "x"),
        ("x = %gpumem --json", "x"),
        ("files = !ls\nfor f in files: pass", "files f"),
        ("x?\ny = 1", "y"),
    ],
)
def test_magics_as_ipython_transforms_them(typed: str, bound: str) -> None:
    names = cell_names(TransformerManager().transform_cell(typed))

    assert names is not None
    assert names.bound == set(bound.split())


@pytest.mark.parametrize("source", ["1 +", "%time x", "\0", "(" * 500, "x = " + "-" * 50_000 + "1"])
def test_what_is_no_python_has_no_names(source: str) -> None:
    assert cell_names(source) is None


@pytest.mark.parametrize(
    ("typed", "unbound"),
    [
        ("%%profile_fit -o report\nlearn.fit(3)", "report"),
        ("%%time\ndel learn\nx.fit()", "learn"),
        ("%xdel learn\nx.fit()", "learn"),
        ("if x:\n    %reset_gpu learn\nx = 1", "learn x"),
        ("!echo $learn\nx + 1", "learn"),
        ("print(x\n% 2)", ""),
        ("x = %time learn.fit()", "learn report x"),
        ("%%bash\necho $x", "learn report x"),
    ],
)
def test_a_magic_is_suspected_of_the_names_in_its_line_alone(typed: str, unbound: str) -> None:
    assert {"learn", "report", "x"} & _unbound_by(typed, frozenset({"learn", "report", "x"})) == set(unbound.split())


@pytest.mark.parametrize("source", ["def f():\n    x = 1", "y = [x for x in [1]]", "y = lambda x: x", "class A:\n    x = 1"])
def test_all_who_ask_hear_the_same(source: str) -> None:
    import ast

    assert "x" not in _unbound_by(source, frozenset({"x"}))
    assert "x" not in names_bound(ast.parse(source))
    assert "x" not in names_in(source, 99)[1]
    assert Cells(["", "x = 1", source]).birth("x") == 1
    assert cells_behind(["", "x = 3", source, "learn = make(x)", "learn.fit(1)"], ["learn"], 4) == {
        1: "made",
        3: "made",
        4: "runs",
    }
