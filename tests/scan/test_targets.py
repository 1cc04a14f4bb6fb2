from __future__ import annotations

import collections
import dataclasses
import re
import weakref
from typing import Any

import numpy
import pandas
import pytest
import torch

import nbguard
from nbguard.errors import TargetError
from nbguard.frontend.notebook.magics.command_line import split
from nbguard.memory.scan.roots.registries import Cells
from nbguard.memory.scan.scan import Notebook
from nbguard.memory.scan.shown_targets import targets_of
from nbguard.memory.scan.targets import resolve_targets

pytestmark = pytest.mark.usefixtures("frozen_libraries")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("learn", ["learn"]),
        ("  learn   best ", ["learn", "best"]),
        ("learn, best", ["learn", "best"]),
        ("runs['a'] runs[\"my run\"]", ["runs['a']", 'runs["my run"]']),
        ("grid[(1, 2)] --dry-run", ["grid[(1, 2)]", "--dry-run"]),
        ("runs[names['x y']].model -o out", ["runs[names['x y']].model", "-o", "out"]),
        ("runs['it]s']", ["runs['it]s']"]),
    ],
)
def test_a_line_splits_at_blanks_outside_brackets_and_quotes(line: str, words: list[str]) -> None:
    assert split(line) == words


def test_targets_are_whatever_del_accepts() -> None:
    net = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2)})
    names = {"net": net, "runs": {"a": net, 3: 1}, "many": [net, 1], "k": "a"}

    found = resolve_targets(
        ["net", "runs['a']", "runs[k]", "runs[3]", "many[-2]", "net.body.weight", "many[0:1]", "net['body']"], names, {}, {}
    )

    assert [target.is_known for target in found] == [True, True, True, True, True, True, False, False]
    assert found[1].value == found[2].value == id(net)
    assert found[5].value == id(net.body.weight)


class _Meta(type):
    @property
    def asked(cls) -> Any:
        raise AssertionError("this is the user's code")


class _Registry(metaclass=_Meta):
    items = {"a": [1.0]}  # noqa: RUF012
    asked = (2.0,)

    @staticmethod
    def made() -> None:
        """Be a descriptor in the class."""


class _Sub(_Registry):
    """A class that has them from another."""


def test_attributes_of_classes_are_looked_up_where_no_code_computes_them() -> None:
    names = {"Registry": _Registry, "Sub": _Sub}
    texts = ["Registry.items['a']", 'Registry.items["a"]', "Sub.items['a']", "Registry.items", "Sub.items"]

    found = resolve_targets([*texts, "Registry.asked", "Registry.made"], names, {}, {})

    items = _Registry.items
    assert [target.value for target in found[:5]] == [id(items["a"])] * 3 + [id(items)] * 2
    assert [bool(target.containers) for target in found] == [True] * 4 + [False] * 3
    assert [target.is_known for target in found[5:]] == [False, False]


@pytest.mark.parametrize("text", ["1", "f()", "a b", "a = 1", "", "a + b", "(a, b)", "a; b", "*a", "lambda: 0"])
def test_what_del_does_not_accept_is_refused(text: str) -> None:
    with pytest.raises(TargetError, match="not something that can be freed"):
        resolve_targets([text], {"a": 1, "b": 2}, {}, {})


def test_a_suggested_name_is_of_data() -> None:
    """`from … import *` brings hundreds of names of functions and classes: nobody means one of those."""
    namespace = {"big_one": torch.zeros(1), "bigger": len, "bigs": torch.nn.Linear, "bigg": torch}

    with pytest.raises(TargetError, match="did you mean big_one"):
        resolve_targets(["big"], namespace, {}, {})
    with pytest.raises(TargetError, match="name 'big' does not exist") as refused:
        resolve_targets(["big"], {name: value for name, value in namespace.items() if name != "big_one"}, {}, {})
    assert "mean" not in str(refused.value)


def test_a_suggested_name_is_none_that_an_import_of_all_names_brought() -> None:
    """fastai brings data, too: placeholders such as `arg2`."""
    namespace = {"arg2": object(), "lean": 1, "In": ["", "from fastai.basics import *", "lean = 1"]}

    with pytest.raises(TargetError, match="did you mean lean"):
        resolve_targets(["learn2"], namespace, {}, {})
    with pytest.raises(TargetError, match="name 'arg9' does not exist") as refused:
        resolve_targets(["arg9"], namespace, {}, {})
    assert "mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("net.wieght", "weight"),
        ("net.weight.dta", "data"),
        ("runs['lern']", "learn"),
        ("runs['learn'].baes", "bias"),
        ("many.apend", "append"),
        ("number.rael", "real"),
    ],
)
def test_an_attribute_or_key_that_does_not_exist_is_told_with_the_one_that_looks_like_it(text: str, meant: str) -> None:
    net = torch.nn.Linear(2, 2)
    names = {"net": net, "runs": {"learn": net}, "many": [net], "number": 3}

    with pytest.raises(TargetError, match=f"does not exist.*did you mean {meant}"):
        resolve_targets([text], names, {}, {})


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class _Frozen:
    data: Any


class _Output(dict[str, Any]):
    """An output as Transformers and Diffusers have them."""

    def __init__(self, data: Any) -> None:
        super().__init__(data=data)
        self.data = data

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"You cannot use __delitem__ on a {type(self).__name__} instance.")


class _Box:
    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def shown(self) -> Any:
        return self.data


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("fixed[0]", "fixed"),
        ("runs['pair'].left", "runs['pair']"),
        ("runs['pair'].left[1:2]", "runs['pair']"),
        ("frozen.data", "frozen"),
        ("table[1]", "table"),
        ("table[1][0]", ""),
        ("frozen.data[0]", ""),
        ("box.data", ""),
        ("box.shown", "box"),
    ],
)
def test_a_part_that_cannot_be_deleted_is_refused_with_what_can(text: str, whole: str) -> None:
    many = [torch.ones(1000)]
    names = {"fixed": (many, 1), "runs": {"pair": Pair((many[0], 1), 1)}, "frozen": _Frozen(many), "box": _Box(many)}
    names["table"] = table = numpy.empty(2, dtype=object)
    table[:] = [1, [torch.ones(1000)]]
    notebook = Notebook(shell=None, namespace=names)

    if not whole:
        assert targets_of([text], notebook)
        return
    with pytest.raises(TargetError, match="cannot be deleted: .*" + re.escape(f'nbguard.release("{whole}")')):
        targets_of([text], notebook)


def _tensors(count: int) -> list[Any]:
    return [torch.ones(1 << 18) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("alone['x']", 3),
        ("pair['x']", 0),  # pandas keeps both columns in one block, which `pair['y']` needs
        ("series[1]", 1),
        ("named['b']", 1),
        ("seen[1]", 0),  # its array has another holder, so that it stays with the element
        ("twice[0]", 0),
    ],
)
def test_of_a_part_of_a_table_as_many_bytes_come_back_as_were_promised(text: str, mib: int) -> None:
    """Each was promised 0 bytes, and gave what it had."""
    alone, x, y, series, named, seen = (_tensors(number) for number in (3, 2, 2, 3, 3, 3))
    twice = _tensors(1) * 2
    alive = [weakref.ref(tensor) for part in (alone, x, y, series, named, seen, twice) for tensor in part]
    names: dict[str, Any] = {
        "alone": pandas.DataFrame({"x": alone, "n": range(3)}),
        "pair": pandas.DataFrame({"x": x, "y": y}),
        "series": pandas.Series(series),
        "named": pandas.Series(named, index=list("abc")),
        "seen": pandas.Series(seen),
        "twice": pandas.Series(twice),
    }
    names["view"] = names["seen"].array
    del alone, x, y, series, named, seen, twice

    promised = nbguard.plan(text, namespace=names).promised
    nbguard.release(text, namespace=names)

    assert (promised, sum(tensor() is None for tensor in alive)) == (mib << 20, mib)


def test_an_element_of_a_named_tuple_is_written_by_its_field_and_goes_with_the_tuple() -> None:
    """`buf.memory[0] → Tensor` of a replay buffer was no expression, and so its graphs had no line."""
    names: dict[str, Any] = {"memory": [Pair(torch.ones(9), torch.ones(1 << 18)), Pair(torch.ones(9), torch.ones(1 << 18))]}
    names["alias"] = names["memory"][1].right

    lines = {path.text: path.advice.command for path in nbguard.why("alias", namespace=names).paths}

    assert lines == {"alias": "%reset_gpu alias", "memory[1].right": "%reset_gpu memory[1]"}


def test_a_column_is_explained_with_its_table() -> None:
    names = {"table": pandas.DataFrame({"x": _tensors(2)})}

    with pytest.raises(TargetError, match=r"is made when it is asked for, .*nbguard.why\(\"table\"\)"):
        nbguard.why("table['x']", namespace=names)


def test_no_line_takes_a_librarys_object_apart() -> None:
    table = pandas.DataFrame({"losses": [torch.ones(1000), torch.ones(1000)]})
    own = _Box([])
    own._mgr = table["losses"][0]  # type: ignore[attr-defined]
    names = {"table": table, "own": own, "one": own._mgr}  # type: ignore[attr-defined]
    del table, own

    lines = {path.advice.command for path in nbguard.why("one", namespace=names).paths}

    assert lines == {"%reset_gpu one", "%reset_gpu table", "%reset_gpu own._mgr"}


def test_the_line_of_a_part_that_cannot_be_deleted_deletes_the_whole() -> None:
    table = numpy.empty((2, 2), dtype=object)
    table[1, 1] = torch.ones(1000)
    names = {"frozen": _Frozen(torch.ones(1000)), "table": table, "more": [_Frozen([torch.ones(1000)])]}
    names["out"] = _Output(torch.ones(1000))
    names |= {"a": names["frozen"].data, "b": table[1, 1], "c": names["more"][0].data, "d": names["out"].data}
    del table

    lines = {path.advice.command for name in "abcd" for path in nbguard.why(name, namespace=names).paths}

    assert lines == {f"%reset_gpu {text}" for text in ("a", "b", "c", "d", "frozen", "table", "more[0]", "out")}


def test_the_birth_of_a_name_is_the_last_cell_that_binds_it() -> None:
    cells = Cells(
        [
            "",
            "learn = 1",
            "for t in x: pass",
            "get_ipython().run_line_magic('time', 'learn = make()')",
            "def f(): pass",
            "bad syntax here (",
        ]
    )

    assert [cells.birth(name) for name in ("learn", "t", "f", "nothing")] == [3, 2, 4, None]
