"""`%%profile_fit` in a real kernel: the cell runs as without it, whatever it does, and the report comes after it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from nbguard.frontend.cli import main
from tests.kernels import Kernel

PRELUDE = """
import time, torch
from fastai.basics import *
data = [(torch.full((4,), float(i)), torch.tensor(i % 2)) for i in range(64)]
def learner(*cbs):
    found = Learner(DataLoaders.from_dsets(data, data[:16], bs=8, num_workers=0, device='cpu'), nn.Linear(4, 2),
                    loss_func=CrossEntropyLossFlat(), cbs=list(cbs))
    found.remove_cbs([cb for cb in found.cbs if cb.name == 'progress'])
    return found
learn = learner()
before = (torch.nn.Module.__call__, Learner._call_one, torch.autograd.backward)
"""
UNTOUCHED = "(torch.nn.Module.__call__, Learner._call_one, torch.autograd.backward) == before"


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with a Learner at hand and nbguard."""
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard").ok()
    return kernel


def test_a_cell_runs_as_it_is(notebook: Kernel) -> None:
    cell = notebook.run("%%profile_fit -o r\nx = 40\nwith learn.no_logging(): learn.fit(2)\nprint('printed')\nx + 2").ok()

    assert (cell.stdout, cell.bundles[0]["text/plain"]) == ("printed\n", "42")
    assert notebook.value("(x, Out[max(Out)], _)") == (40, 42, 42)
    assert notebook.value("(r.timing.batches, r.timing.fits, r.ending, r.is_partial)") == (16, 1, "complete", False)
    assert notebook.value("sum(row.total for row in r.timing.rows) == r.timing.wall")
    assert notebook.value(UNTOUCHED)


def test_the_report_is_shown_once_and_last(notebook: Kernel) -> None:
    cell = notebook.run("%%profile_fit\nwith learn.no_logging(): learn.fit(1)\n'the result'").ok()

    result, report = (bundle["text/plain"] for bundle in cell.bundles)
    assert result == "'the result'"
    assert report.count("where the time went") == 1
    assert "fastai fit" in report


def test_the_answer_fits_on_a_screen_and_its_last_line_shows_all_figures(notebook: Kernel) -> None:
    brief = notebook.run("%%profile_fit\nwith learn.no_logging(): learn.fit(2)").ok()
    command = brief.text.splitlines()[-1].split()[:2]
    whole = notebook.run(" ".join(command)).ok()
    at_once = notebook.run("%%profile_fit --all\nwith learn.no_logging(): learn.fit(1)").ok()

    assert command == ["%profile_fit", "--last"]
    assert len(brief.text.splitlines()) <= 20
    assert "settings" not in brief.text
    assert "settings" in whole.text
    assert "settings" in at_once.text
    assert "settings" in brief.bundles[0]["text/html"]  # behind a click
    assert notebook.run("%profile_fit --last").ok().text == at_once.text


def test_an_error_is_the_users_and_the_report_is_partial(notebook: Kernel) -> None:
    source = "%%profile_fit -o r\nclass Fails(Callback):\n    def after_pred(self):\n        if self.iter == 4: raise KeyError('mine')\nlearn.add_cb(Fails())\nlearn.fit(1)"
    cell = notebook.run(source, stop_on_error=False)

    assert cell.error is not None
    assert cell.error[0] == "KeyError"
    assert "raise KeyError('mine')" in cell.traceback
    assert "torch_loop" not in cell.traceback
    assert notebook.value("(r.ending, r.error, r.timing.batches)") == ("error", "KeyError", 5)
    assert notebook.value(UNTOUCHED)
    assert notebook.value("type(__import__('sys').last_value).__name__") == "KeyError"


def test_lines_of_errors_are_those_of_the_cell(notebook: Kernel) -> None:
    cell = notebook.run("%%profile_fit\n\n\n1 / 0", stop_on_error=False)

    assert "----> 4 1 / 0" in cell.traceback or "line 4" in cell.traceback
    assert "torch_loop" not in cell.traceback


def test_an_error_stops_the_cells_behind_it(notebook: Kernel) -> None:
    notebook.client.execute("%%profile_fit\n1 / 0")
    notebook.client.execute("reached = 1")
    notebook.run("after = 1", stop_on_error=False)

    assert notebook.value("'reached' in globals()") is False


def test_an_interrupt(notebook: Kernel) -> None:
    def interrupt() -> None:
        while not (notebook.cwd / "begun").exists():
            time.sleep(0.02)
        os.kill(notebook.pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    cell = notebook.run(
        "%%profile_fit -o r\nclass Slow(Callback):\n    def after_batch(self):\n        time.sleep(.02)\n"
        "        if self.train_iter == 5: Path('begun').touch()\n"
        "learn.add_cb(Slow())\nwith learn.no_logging(): learn.fit(100)",
        stop_on_error=False,
    )
    thread.join()

    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"
    assert notebook.value("(r.ending, r.timing.batches > 3)") == ("interrupted", True)
    assert notebook.value(UNTOUCHED)


def test_an_interrupt_before_the_cell_begins(notebook: Kernel) -> None:
    notebook.run(
        "from nbguard.training.profiler.record.learner_loop import LearnerLoop\nstart = LearnerLoop.start\n"
        "def interrupted(self): raise KeyboardInterrupt\nLearnerLoop.start = interrupted"
    ).ok()

    cell = notebook.run("%%profile_fit\nreached = 1", stop_on_error=False)

    assert cell.error == ("KeyboardInterrupt", "%%profile_fit was interrupted before the cell began; none of its lines ran")
    notebook.run("LearnerLoop.start = start").ok()
    assert notebook.value("'reached' in globals()") is False
    assert notebook.value(UNTOUCHED)
    assert "nothing was trained" in notebook.run("%%profile_fit\nreached = 1").ok().text


@pytest.mark.parametrize(
    "body",
    [
        "import asyncio\nawait asyncio.sleep(0)\nwith learn.no_logging(): learn.fit(1)",
        "%%time\nwith learn.no_logging(): learn.fit(1)",
        "%time learn.fit(1)",
        "%%capture\nlearn.fit(1)",
        "get_ipython().run_cell('1 + 1')\nwith learn.no_logging(): learn.fit(1)",
        "exec('with learn.no_logging(): learn.fit(1)')",
        "learn.fit(1);",
        " learn.fit(1)\n 1",
        "\n  learn.fit(1)",
    ],
)
def test_whatever_a_cell_may_hold(notebook: Kernel, body: str) -> None:
    notebook.run(f"%%profile_fit -o r\n{body}").ok()

    assert notebook.value("(r.timing.batches, r.ending)") == (8, "complete")


@pytest.mark.slow
def test_a_cell_that_imports_fastai_itself(plain_kernel: Kernel) -> None:
    """The first fit is under way when the marks are put in: it is one of the Learner's all the same."""
    sleeps = "class Sleeps(Callback):\n    def after_step(self): time.sleep(.003)\n"
    fit = "learn.add_cb(Sleeps())\nwith learn.no_logging(): learn.fit(2)"
    plain_kernel.run("%load_ext nbguard").ok()
    plain_kernel.run(f"%%profile_fit -o r\n{PRELUDE}{sleeps}{fit}").ok()

    assert plain_kernel.value("(r.timing.fits, r.timing.batches, [e.batches for e in r.timing.epochs])") == (
        1,
        16,
        [8, 2, 8, 2],
    )
    (median,) = plain_kernel.value("[row.median for row in r.timing.rows if row.phase == 'callback Sleeps']")
    assert 3e6 < median < 9e6
    assert "nbguard" not in plain_kernel.value("Learner._call_one.__module__ + Sleeps.after_step.__module__")
    assert not plain_kernel.value("hasattr(Learner._call_one, '__wrapped__') or hasattr(Sleeps.after_step, '__wrapped__')")


def test_inside_another_magic(notebook: Kernel) -> None:
    notebook.run("%%capture out\n%%profile_fit -o r\nwith learn.no_logging(): learn.fit(1)").ok()
    notebook.run("get_ipython().run_cell_magic('profile_fit', '-o s', 'with learn.no_logging(): learn.fit(1)')").ok()

    assert notebook.value("(r.timing.batches, s.timing.batches)") == (8, 8)


def test_the_code_is_kept_as_typed(notebook: Kernel) -> None:
    source = "%%profile_fit -o r\nwith learn.no_logging(): learn.fit(1)"
    notebook.run(source).ok()

    history = notebook.value("[line for _, _, line in get_ipython().history_manager.get_range(raw=True)]")
    assert source in history


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("%%profile_fit --nonsense\nlearn.fit(1)", "unrecognized arguments: --nonsense"),
        ("%profile_fit learn.fit(1)", "write  %%profile_fit  and in the next line  learn.fit(1)"),
        (
            "%profile_fit --memory learn.fit(1, cbs=[])",
            "write  %%profile_fit --memory  and in the next line  learn.fit(1, cbs=[])",
        ),
        ("%%profile_fit -o 3x\nlearn.fit(1)", "3x is not the name of a variable"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_has_run(notebook: Kernel, source: str, says: str) -> None:
    cell = notebook.run(source, stop_on_error=False)

    assert cell.error is not None
    assert cell.error[0] == "UsageError"
    assert says in cell.error[1]
    assert notebook.value("learn.opt is None")
    assert notebook.value(UNTOUCHED)


def test_a_cell_in_which_nothing_trained_is_one_line_however_it_ends(notebook: Kernel) -> None:
    for code, ending in (
        ("1 + 1", "complete"),
        ("nobody", "it failed (NameError)"),
        ("raise KeyboardInterrupt", "interrupted"),
    ):
        text = notebook.run(f"%%profile_fit\n{code}", stop_on_error=False).bundles[-1]["text/plain"].strip()

        assert len(text.splitlines()) == 1
        assert ending in text
        assert "nothing was trained here" in text


def test_the_next_cell_is_not_profiled_and_unloading_takes_all_off(notebook: Kernel) -> None:
    notebook.run("%%profile_fit -o r\nwith learn.no_logging(): learn.fit(1)").ok()
    notebook.run("with learn.no_logging(): learn.fit(1)").ok()
    notebook.run("%%profile_fit\n%unload_ext nbguard").ok()

    assert notebook.value("r.timing.batches") == 8
    assert notebook.value(UNTOUCHED)
    assert notebook.value("'profile_fit' in get_ipython().magics_manager.magics['cell']") is False
    assert notebook.value("len(get_ipython().events.callbacks['post_run_cell'])") == notebook.value(
        "len([each for each in get_ipython().events.callbacks['post_run_cell'] if 'nbguard' not in (each.__module__ or '')])"
    )
    assert notebook.run("%%profile_fit\n1", stop_on_error=False).error is not None


def test_help_names_every_option(notebook: Kernel) -> None:
    text = notebook.value("get_ipython().object_inspect_text('%%profile_fit')")

    for option in ("--memory", "--tune-workers", "--stop-on-nan", "--check-ranks"):
        assert option in text


def test_a_saved_profile_is_shown_again_on_the_command_line(
    notebook: Kernel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my fit.json"
    cell = notebook.run(f"%%profile_fit --all --save '{path}'\nwith learn.no_logging(): learn.fit(2)").ok()

    assert main(["profile", str(path)]) == 0

    shown = cell.bundles[-1]["text/plain"]
    again = capsys.readouterr().out
    assert again.startswith("In[")
    assert [line for line in shown.splitlines() if "written" not in line] == again.splitlines()


def test_what_is_warned_of_once_is_not_shown_again(notebook: Kernel) -> None:
    notebook.run(
        "import types, warnings\n"
        "warnings.simplefilter('default')\n"
        "library = types.ModuleType('library')\n"
        "exec(\"import warnings\\ndef once(): warnings.warn('planted')\", vars(library))"
    ).ok()
    first = notebook.run("with learn.no_logging(): learn.fit(1)\nlibrary.once()").ok()
    again = notebook.run("%%profile_fit\nwith learn.no_logging(): learn.fit(1)\nlibrary.once()").ok()
    third = notebook.run("with learn.no_logging(): learn.fit(1)\nlibrary.once()").ok()

    assert ["planted" in cell.stderr for cell in (first, again, third)] == [True, False, False]


def test_two_fits_of_a_cell_are_two_reports(notebook: Kernel) -> None:
    cell = notebook.run("%%profile_fit -o r\nwith learn.no_logging(): learn.fit(1)\nlearner().fit(2)").ok()

    (text,) = [bundle["text/plain"] for bundle in cell.bundles if "where the time went" in bundle.get("text/plain", "")]
    assert text.count("where the time went") == 2
    assert notebook.value("([each.timing.batches for each in r.earlier], r.timing.batches)") == ([8], 16)
    assert notebook.value(UNTOUCHED)


def test_what_others_do_at_the_end_of_a_cell_is_no_part_of_it(notebook: Kernel) -> None:
    notebook.run("get_ipython().events.register('post_run_cell', lambda _: time.sleep(1.5))").ok()
    notebook.run("%%profile_fit -o r\nwith learn.no_logging(): learn.fit(1)").ok()

    assert notebook.value("r.timing.wall") < 1_400_000_000


def test_magics_inside_of_the_cell_do_what_they_do(notebook: Kernel) -> None:
    cell = notebook.run(
        "%%profile_fit -o r\nwith learn.no_logging():\n    %time learn.fit(1)\n    t = %timeit -n 1 -r 2 -q -o learn.fit(1)\nt.repeat"
    ).ok()

    assert "Wall time" in cell.stdout
    assert cell.bundles[0]["text/plain"] == "2"
    assert notebook.value("(r.timing.batches, r.ending)") == (24, "complete")
    assert notebook.value(UNTOUCHED)


def test_a_cell_that_defines_the_model_anew_is_profiled_each_time(notebook: Kernel) -> None:
    source = (
        "%%profile_fit -o r\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.l = nn.Linear(4, 2)\n"
        "    def forward(self, x): return self.l(x)\ntorch.manual_seed(1)\nlearn = Learner(learn.dls, Net(), loss_func=CrossEntropyLossFlat())\n"
        "with learn.no_bar(), learn.no_logging(): learn.fit(1)\nends = learn.model.l.weight.sum().item()"
    )
    ends = []
    for cell in (source, source, source.partition("\n")[2]):
        notebook.run("learn.dls.train.rng.seed(1)").ok()  # fastai's loader shuffles by a generator of its own, which goes on
        notebook.run(cell).ok()
        ends.append(notebook.value("ends"))

    assert len(set(ends)) == 1
    assert notebook.value("(r.timing.batches, r.ending)") == (8, "complete")
    assert notebook.value("'__call__' in vars(Net)") is False
    assert notebook.value(UNTOUCHED)
