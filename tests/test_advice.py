"""Advice has both its forms, and a text that it is added to keeps them. Each call exists and takes what it is given."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbguard
from nbguard.errors import TargetError
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Advice
from nbguard.render.html import Line, Table, TableRow, blocks_html
from nbguard.render.text import blocks_text
from nbguard.texts import BEHIND_MORE, Text, before_start, capitalised, form, here, joined

GIVEN = {
    "names": ["learn", "runs['a']", 'runs["my run"]'],
    "paths": ["learn.model.cache"],
    "name": "net",
    "label": "Out[3]",
    "path": "finalizers[2]",
    "batch": "xb",
}
"""What a maker is given, by the name of its parameter; the other parameters that it needs are of lines of Python."""
ONLY_MAGICS = {
    *(advice.HISTORY, advice.CELLS_ON, advice.SIMULATE_OFF, advice.ON, advice.AUTO_CLEAN, advice.LOG_OFF, advice.NOTICES_ON),
    *(advice.release_stale_of_engines(), advice.repair_nan(), advice.repair_nan("net")),
    *(advice.SAVE_RECORD, advice.ALL_HOLDERS, advice.PREDICT_CELL),
    *(advice.ASSISTANTS, advice.ASSISTANTS_ON, advice.ASSISTANTS_OFF),
}
"""About cells, engines, the sidebar or assistants, or options of rows: there is no call that does the same."""


def made() -> Iterator[Advice]:
    """Yield each fixed advice, and that of each maker: with as little as it takes, and with all that it knows."""
    for each in vars(advice).values():
        if isinstance(each, Advice):
            yield each
        elif inspect.isfunction(each) and inspect.signature(each).return_annotation == "Advice":
            parameters = inspect.signature(each).parameters.values()
            needed = {one.name for one in parameters if one.default is one.empty}
            if needed <= GIVEN.keys():
                yield each(**{name: GIVEN[name] for name in needed})
                flags = {one.name: True for one in parameters if one.default is False}
                yield each(**{one.name: GIVEN[one.name] for one in parameters if one.name in GIVEN}, **flags)


MADE = {each.command: each for each in made() if each.command.startswith("%")}


def test_the_makers_are_found() -> None:
    assert len(MADE) > 40
    assert {"%reset_gpu", "%gpumem why net", "%nbguard fix determinism net --warn-only"} <= MADE.keys()


@pytest.mark.parametrize("command", sorted(MADE))
def test_each_command_has_a_call_that_the_function_takes(command: str) -> None:
    made = MADE[command]
    if made in ONLY_MAGICS:
        assert not made.call
        return
    statement = ast.parse(made.call).body[0]
    assert isinstance(statement, (ast.Expr, ast.Assign))
    call = statement.value
    if command == advice.SIMULATE_ALL.command:  # of what `nbguard.simulate` returned: tests/simulation asks it
        assert made.call == "sim.figures().assumptions"
        return
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "undo":  # of what the call for the same command without `--undo` returned
        assert MADE[command.removesuffix(" --undo")].call.startswith("repeat = ")
        return
    try:
        function = getattr(nbguard, call.func.attr)
    except ModuleNotFoundError as missing:  # in `make unit`: some modules import PyTorch, or fastai
        pytest.skip(str(missing))
    inspect.signature(function).bind(*call.args, **{word.arg: word.value for word in call.keywords if word.arg})


def test_names_are_strings_of_a_call_and_objects_stand_as_they_are() -> None:
    assert advice.release_names(["losses", 'runs["my run"]']).call == """nbguard.release("losses", 'runs["my run"]')"""
    assert advice.release_names(["losses"], has_caches=True).call == 'nbguard.release("losses", caches=True)'
    assert advice.diagnose("net", "xb").call == "nbguard.diagnose(net, xb)"
    assert (
        advice.make_deterministic("learn", warn_only=True).call == "repeat = nbguard.deterministic(learn=learn, warn_only=True)"
    )


def test_a_line_of_python_is_the_same_everywhere() -> None:
    line = advice.zero_gradients("learn")

    assert (line.call, form(line.command, "python"), form(line.command, "terminal")) == ("", line.command, line.command)


def test_a_sentence_keeps_the_forms_of_what_it_was_made_of() -> None:
    release, why = advice.release_names(["a"]), advice.why("b")

    for sentence in (
        "run " + release.code + f" or {1}: " + why.code + "!",
        joined("", ("run ", release.code, " or 1: ", why.code, "!")),
        ("RUN ".lower() + release.code + "|" + why.code + "!").replace("|", " or 1: "),
        capitalised("run " + release.code + " or 1: " + why.code + "!").replace("Run", "run"),
        joined("", ("run " + release.code + " or 1: \n" + why.code + "!").splitlines()),
    ):
        assert isinstance(sentence, Text)
        assert sentence == "run `%reset_gpu a` or 1: `%gpumem why b`!"
        assert form(sentence, "python") == form(sentence, "terminal") == 'run `nbguard.release("a")` or 1: `nbguard.why("b")`!'


def test_a_terminal_has_a_command_of_its_own_where_there_is_one() -> None:
    shown = "name one, as in  " + advice.diagnose().command

    assert form(shown, "terminal") == "name one, as in  nbguard doctor train:learn"
    assert blocks_text([Line(shown)], "terminal").endswith("nbguard doctor train:learn")


@pytest.mark.parametrize("host", ["marimo", "Python"])
def test_without_ipython_no_option_of_a_magic_is_offered_and_the_host_has_its_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbguard.texts.running_shell", lambda: None)
    monkeypatch.setitem(sys.modules, "marimo", types.SimpleNamespace(running_in_notebook=lambda: host == "marimo"))  # type: ignore[arg-type]

    assert form("a, b" + BEHIND_MORE, "python") == "a, b"
    assert form("unset X  # " + before_start(), "python") == f"unset X  # before {host} starts"
    assert form("unset X  # " + before_start(), "notebook") == "unset X  # before Jupyter starts"


def test_in_a_table_columns_stand_below_one_another() -> None:
    rows = tuple(TableRow(cells=(name, advice.release_names([name]).command, "list")) for name in ("losses", "x"))
    blocks = (Line("see " + advice.MAP.code), Table(rows=rows, code=(0, 1)))

    text = blocks_text(blocks, "python")

    assert 'nbguard.release("losses")  list' in text
    assert 'nbguard.release("x")       list' in text
    assert "<code>nbguard.memory_map()</code>" in str(blocks_html(blocks, "report", "python"))
    assert "%reset_gpu losses  list" in blocks_text(blocks)


def test_errors_name_calls_where_there_are_no_magics(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TargetError("nothing to explain (" + advice.REPORT.command + " lists what does)")
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=object))  # type: ignore[arg-type]
    assert here() == "notebook"
    assert str(error) == "nothing to explain (%gpumem lists what does)"
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    assert here() == "python"
    assert str(error) == "nothing to explain (nbguard.report() lists what does)"


_SCRIPT = """
import re
import torch, nbguard
model, losses, x = torch.nn.Linear(1000, 1000), [], torch.randn(4, 1000)
for _ in range(30):
    losses.append(model(x).sum())
done = []
for look in (nbguard.report, lambda: nbguard.why("losses"), lambda: nbguard.park("model"), nbguard.report):
    said = str(look())
    assert not re.search("%(gpumem|reset_gpu|nbguard)", said), said
    for call in sorted(set(re.findall(r"nbguard\\\\.\\\\w+\\\\(.*?\\\\)", said)), reverse=True):
        if "release" in call and ("losses" not in call or "model" in call or '"x"' in call):
            continue  # what it names is needed below
        result = eval(call)
        done.append(f"{call}: {str(result).split('  ')[0]}")
        if "losses" in call and "release" in call:
            assert "losses" not in globals()
            losses = [model(x).sum()]
print(*done, sep=chr(10))
"""


def test_a_script_can_run_each_call_that_its_reports_print(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "script.py").write_text(_SCRIPT.replace("\\\\", "\\"))
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    calls = [line.partition(":")[0] for line in ran.stdout.splitlines()]
    assert 'nbguard.why("losses")' in calls
    assert 'nbguard.release("losses")' in calls
    assert 'nbguard.unpark("model")' in calls
