"""Commands as calls of Python, where there are no magics: each call that is printed exists and takes what it is given."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import nbguard
from nbguard.calls import as_calls, call_of, has_magics
from nbguard.errors import TargetError
from nbguard.memory.core import advice
from nbguard.render.blocks import Line, Table, TableRow
from nbguard.render.html import blocks_html
from nbguard.render.in_calls import in_calls
from nbguard.render.text import blocks_text

MADE = (
    *(each.command for each in vars(advice).values() if isinstance(each, advice.Advice)),
    *(
        each.command
        for each in (
            advice.release_stale(),
            advice.release_names(["learn", "runs['a']", 'runs["my run"]']),
            advice.release_output("Out[3]"),
            advice.release_errors(),
            advice.empty_caches(),
            advice.end_workers(),
            advice.park(["net", "other"]),
            advice.unpark(["net"]),
            advice.why("losses[3]"),
            advice.diagnose("net"),
            advice.make_deterministic("learn", warn_only=True),
            advice.make_deterministic(),
            advice.repair_export("net", "xb"),
        )
    ),
    *("%%profile_fit", "%%profile_fit --stop-on-nan", "%%profile_fit --save FILE", "%nbguard record learn"),
)
ONLY_MAGICS = {
    *(each.command for each in (advice.HISTORY, advice.CELLS_ON, advice.SIMULATE_OFF, advice.ON, advice.AUTO_CLEAN)),
    *(each.command for each in (advice.LOG_OFF, advice.NOTICES_ON)),
}
"""Commands about cells of IPython: without it there is nothing to be said."""
OF_ROWS = {advice.ALL_HOLDERS.command}
"""Options that show more rows: a result of Python has all of them."""


@pytest.mark.parametrize("command", sorted({each for each in MADE if each.startswith("%")} - ONLY_MAGICS - OF_ROWS))
def test_each_command_that_is_made_has_a_call_that_the_function_takes(command: str) -> None:
    statement = ast.parse(call_of(command)).body[0]
    assert isinstance(statement, (ast.Expr, ast.Assign))
    call = statement.value
    if command == advice.SIMULATE_ALL.command:  # of what `nbguard.simulate` returned: tests/simulation asks it
        assert call_of(command) == "sim.figures().assumptions"
        return
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "undo":  # of what the call for the same command without `--undo` returned
        assert call_of(command.removesuffix(" --undo")).startswith("repeat = ")
        return
    try:
        function = getattr(nbguard, call.func.attr)
    except ModuleNotFoundError as missing:  # in `make unit`: some modules import PyTorch, or fastai
        pytest.skip(str(missing))
    inspect.signature(function).bind(*call.args, **{word.arg: word.value for word in call.keywords if word.arg})


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("""%reset_gpu runs["my run"] net""", """nbguard.release('runs["my run"]', "net")"""),
        ("""%gpumem why runs["my run"]""", """nbguard.why('runs["my run"]')"""),
        ("%reset_gpu runs[", ""),  # it cannot be read
        ("%reset_gpu --zombies 4711", ""),
        ("%nbguard doctor --ranks", ""),
    ],
)
def test_words_are_those_that_the_magic_reads(command: str, call: str) -> None:
    assert call_of(command) == call


@pytest.mark.parametrize("command", sorted(OF_ROWS))
def test_an_option_of_rows_is_not_said_where_there_are_no_magics(command: str) -> None:
    assert as_calls(command) == ""


@pytest.mark.parametrize("command", sorted(ONLY_MAGICS))
def test_what_only_a_magic_does_stays_as_it_is(command: str) -> None:
    assert call_of(command) == ""
    assert as_calls(f"it is off ({command})") == f"it is off ({command})"


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        ("`%reset_gpu losses` frees it", '`nbguard.release("losses")` frees it'),
        ("`%reset_gpu a` and `%gpumem why b`", '`nbguard.release("a")` and `nbguard.why("b")`'),
        ("nothing to explain (%gpumem lists what does)", "nothing to explain (nbguard.report() lists what does)"),
        ("%reset_gpu unfreezes them, then looks", "nbguard.release() unfreezes them, then looks"),
        ("%reset_gpu --hard clears them", "nbguard.release(hard=True) clears them"),
        ("as in  %reset_gpu learn runs['a']", 'as in  nbguard.release("learn", "runs[\'a\']")'),
        ("run  %gpumem record on , then the cells", "run  nbguard.record() , then the cells"),
        ("`%%profile_fit --stop-on-nan` looks", "`nbguard.profile_fit(stop_on_nan=True)` looks"),
        (
            "profile it with  %%profile_fit --stop-on-nan  again",
            "profile it with  nbguard.profile_fit(stop_on_nan=True)  again",
        ),
        ("as in  %nbguard record learn -o run", "as in  run = nbguard.run_record(learn)"),
        ("as in  %nbguard record learn --save run.json", "as in  %nbguard record learn --save run.json"),
        ("%tb and %debug still work", "its traceback and a debugger still work"),
        ("100 % of it, and 5%", "100 % of it, and 5%"),
    ],
)
def test_commands_in_sentences(sentence: str, shown: str) -> None:
    assert as_calls(sentence) == shown


def sentences(words: str = "%") -> list[tuple[str, str]]:
    """Return the texts with these words that can be shown without IPython, each with its place; docstrings apart."""
    found = []
    package = Path(nbguard.__file__).parent
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if (
                isinstance(node, (ast.Constant, ast.JoinedStr))
                and id(node) not in inside
                and package / "notebook" not in file.parents
            ):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
                if words in text:
                    found.append((f"{file.relative_to(package)}:{node.lineno}", text))
    return found


def test_no_sentence_has_half_of_a_command_as_a_call() -> None:
    """Amid a sentence a command ends with two blanks, a backtick or the sentence: what follows would stand behind the call."""
    half = re.compile(r"nbguard\.\w+\([^()]*\) (?:\S+ )*?--\w")
    assert half.search(as_calls("as in  %nbguard doctor model --batch xb, or so"))
    assert [(place, shown) for place, text in sentences() if half.search(shown := as_calls(text))] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a, b, c, d, … (-n shows more)", "a, b, c, d, …"),
        ("-n shows more", ""),
        (
            "unset LD_LIBRARY_PATH  # before Jupyter starts, unless that is meant",
            "unset LD_LIBRARY_PATH  # before {} starts, unless that is meant",
        ),
    ],
)
@pytest.mark.parametrize("host", ["marimo", "Python"])
def test_without_ipython_no_option_of_a_magic_is_offered_and_the_host_has_its_name(
    text: str, shown: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbguard.shell.running_shell", lambda: None)
    monkeypatch.setitem(sys.modules, "marimo", types.SimpleNamespace(running_in_notebook=lambda: host == "marimo"))  # type: ignore[arg-type]
    assert as_calls(text) == shown.format(host)


@pytest.mark.parametrize("words", ["-n shows", "Jupyter starts"])
def test_no_other_sentence_says_so(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbguard.shell.running_shell", lambda: None)
    assert (said := sentences(words))
    assert [(place, text) for place, text in said if words in as_calls(text)] == []


def test_in_a_table_a_command_is_a_cell_and_columns_stand_below_one_another() -> None:
    rows = (TableRow(cells=("losses", "%reset_gpu losses", "list")), TableRow(cells=("x", "%reset_gpu x", "Tensor")))
    blocks = tuple(in_calls([Line("see `%gpumem map`"), Table(rows=rows, code=(0, 1))]))
    text = blocks_text(blocks)
    assert 'nbguard.release("losses")  list' in text
    assert 'nbguard.release("x")       Tensor' in text
    assert "<code>nbguard.memory_map()</code>" in str(blocks_html(blocks, "report"))


def test_errors_name_calls_where_there_are_no_magics(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TargetError("nothing to explain (%gpumem lists what does)")
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=object))  # type: ignore[arg-type]
    assert has_magics()
    assert str(error) == "nothing to explain (%gpumem lists what does)"
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    assert not has_magics()
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
