"""Hooks around cells in a real kernel: what counts as a cell, what is said after it, and that nothing of the user's changes."""

from __future__ import annotations

import re
import time

import pytest

from tests.kernels import Cell, Kernel
from tests.zoo.cases import FAILED, PRELUDE

_CALLBACKS = "{name: [str(each) for each in found] for name, found in get_ipython().events.callbacks.items()}"
_LOOKED = re.compile(r" · scanned in \d+\.\d s$")
_FAIL = "def f():\n    a = torch.ones(3 << 20); track('a', a); count = 41\n    raise ValueError('on purpose')"


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with the zoo's helpers, nbguard, and a line after each cell that changes memory."""
    kernel.run(PRELUDE).ok()
    kernel.run(
        "%load_ext nbguard\nimport nbguard.memory.cells.name_watch\nnbguard.memory.cells.name_watch._TOO_SLOW = 60"
    ).ok()  # also on a busy machine
    kernel.run("%gpumem cells on").ok()
    return kernel


def _cells(kernel: Kernel) -> list[int]:
    """Return the numbers of the cells that have been recorded."""
    found: list[int] = kernel.value("[record.cell for record in __import__('nbguard').history().records]")
    return found


def _line(cell: Cell) -> str:
    """Return what is said after a cell, without the time it took."""
    return _LOOKED.sub("", cell.text)


def test_a_cell_that_allocates_says_so_in_one_line(notebook: Kernel) -> None:
    cell = notebook.run("t = torch.ones(1 << 20)").ok()

    assert _line(cell) == "In[4]  +4 MiB → 4 MiB · new: t 4 MiB"
    assert len(cell.bundles) == 1
    assert set(cell.bundles[0]) == {"text/plain", "text/html"}
    assert cell.stdout == cell.stderr == ""


def test_a_name_is_since_the_cell_that_bound_it_and_not_since_one_that_failed_before_it_could(notebook: Kernel) -> None:
    births = "{row.label: row.cell for row in __import__('nbguard').report().devices[0].holders}"
    notebook.run("a = torch.ones(1 << 20); b = torch.ones(1 << 20)").ok()
    assert notebook.run("b = torch.ones(2 << 20); new = b * 2; a = missing(); c = 1").error

    assert {name: notebook.value(births)[name] for name in ("a", "b", "new")} == {"a": 4, "b": 5, "new": 5}

    notebook.run("a = torch.ones(2 << 20)").ok()
    assert notebook.value(births)["a"] == 6


def test_a_cell_that_gives_back_says_so_too(notebook: Kernel) -> None:
    notebook.run("t = torch.ones(1 << 20); u = torch.ones(1 << 20)").ok()

    assert _line(notebook.run("del u").ok()) == "In[5]  −4 MiB → 4 MiB · freed: u 4 MiB"


@pytest.mark.slow
def test_a_cell_that_changes_nothing_says_nothing(notebook: Kernel) -> None:
    notebook.run("t = torch.ones(1 << 20)").ok()

    for code in ("x = 1", "u = t[:5]", "big = [object() for _ in range(300_000)]", "del big", "import json", "   "):
        assert notebook.run(code).ok().bundles == []
    assert _cells(notebook) == [4, 5, 6, 7, 8, 9]


def test_a_tensor_smaller_than_the_counters_notice_is_of_the_cell_that_made_it(notebook: Kernel) -> None:
    """Nobody counts CPU tensors, and the process grows by less than a line says."""
    notebook.run("import nbguard.memory.scan.scan as inside; scans, real = [], inside.timed_scan").ok()
    notebook.run("inside.timed_scan = lambda notebook: scans.append(1) or real(notebook)").ok()
    notebook.run("small = torch.ones(1000)").ok()
    notebook.run("net = nn.Linear(10, 10, bias=False)").ok()
    scans = notebook.value("len(scans)")
    notebook.run("data = [{}, {}]").ok()

    came = "[(r.cell, [(s.label, s.nbytes) for s in r.came]) for r in __import__('nbguard').history().records if r.came]"
    assert notebook.value(came) == [(6, [("small", 4000)]), (7, [("net", 400)])]
    assert (scans, notebook.value("len(scans)")) == (2, 2)


def test_what_a_cell_leaves_stale_is_said_though_no_byte_moved(notebook: Kernel) -> None:
    notebook.run("net = nn.Linear(1 << 10, 1 << 10)").ok()
    notebook.run("net").ok()

    cell = notebook.run("net = None").ok()

    line, notice = cell.text.splitlines()
    assert line.startswith("In[6]  ±0 B → 4 MiB · stale: Out[5] 4 MiB (%reset_gpu)")
    assert notice == "the earlier `net` (In[4]) is still alive (4 MiB), held by `Out[5]` · `%reset_gpu Out[5]`"


def test_a_failed_cell_says_what_its_error_holds(notebook: Kernel) -> None:
    notebook.run(_FAIL).ok()

    cell = notebook.run("f()")

    assert cell.error == ("ValueError", "on purpose")
    assert _line(cell) == "In[5]  +12 MiB → 12 MiB · stale: last error 12 MiB (%reset_gpu)"


_WIDGET = """
import ipywidgets
taken = []
button = ipywidgets.Button()
@button.on_click
def clicked(_):
    taken.append(torch.ones(1 << 20))
    if nested: get_ipython().run_cell('taken.append(torch.ones(1 << 20))', store_history=True)
nested = {nested}
"""


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_comm_message_runs_is_no_cell(notebook: Kernel, nested: bool) -> None:
    """A real click, as the browser sends it; and one whose callback runs a cell with a number of its own."""
    notebook.run(_WIDGET.format(nested=nested)).ok()
    before = _cells(notebook)
    comm = notebook.value("button.model_id")
    content = {"comm_id": comm, "data": {"method": "custom", "content": {"event": "click"}}}
    shown = _shown_by(notebook, "comm_msg", content)

    assert notebook.value("len(taken)") == 1 + nested
    assert shown == []
    assert _cells(notebook) == before
    text = notebook.run("x = 1").ok().text
    assert f"{4 * (1 + nested)} MiB" in text  # and the next cell finds it


def _shown_by(kernel: Kernel, kind: str, content: dict[str, object]) -> list[str]:
    """Send a message on the shell channel; return the texts that the kernel showed until it was idle again."""
    message = kernel.client.session.msg(kind, content)
    kernel.client.shell_channel.send(message)
    shown = []
    while True:
        heard = kernel.client.get_iopub_msg(timeout=60)
        if heard["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        if heard["msg_type"] in ("display_data", "stream", "error"):
            shown.append(str(heard["content"]))
        if heard["msg_type"] == "status" and heard["content"]["execution_state"] == "idle":
            return shown


def test_silent_requests_and_those_without_history_do_not_count(notebook: Kernel) -> None:
    notebook.run_silently("a = torch.ones(1 << 20)")
    shown: list[str] = []
    notebook.client.execute_interactive(
        "b = torch.ones(1 << 20)", store_history=False, output_hook=lambda message: shown.append(message["msg_type"])
    )

    assert "display_data" not in shown
    assert _cells(notebook) == []
    assert "+8 MiB" in notebook.run("x = 1").ok().text


def test_a_cell_inside_a_cell_is_part_of_it(notebook: Kernel) -> None:
    cell = notebook.run("get_ipython().run_cell('a = torch.ones(1 << 20)', store_history=True); b = torch.ones(1 << 20)").ok()

    assert cell.text.startswith("In[4]  +8 MiB")
    assert _cells(notebook) == [4]


def test_cells_that_await_or_do_not_compile_count_like_others(notebook: Kernel) -> None:
    notebook.run("import asyncio").ok()
    text = notebook.run("await asyncio.sleep(0.01); t = torch.ones(1 << 20)").ok().text
    notebook.run("1 +")
    notebook.run("raise KeyboardInterrupt")

    assert text.startswith("In[5]  +4 MiB")
    assert _cells(notebook) == [4, 5, 6, 7]
    assert notebook.value("[record.raised for record in __import__('nbguard').history().records]") == [False, False, True, True]


_BAD = """
from nbguard.frontend.notebook.session import session_of
class Bad:
    name, rank, calls, fails = 'the bad listener', 5, 0, True
    def before(self): pass
    def after(self, cell):
        Bad.calls += 1
        if not Bad.fails: return
        mine = torch.ones(1 << 20); track('mine', mine)
        raise TypeError('broken')
session_of(get_ipython())._hooks.add(Bad())
"""


def test_a_listener_that_fails_is_reported_once_and_tried_again(notebook: Kernel) -> None:
    notebook.run(_BAD).ok()

    first = notebook.run("x = 1")
    second = notebook.run("t = torch.ones(1 << 20)")

    assert first.error is None
    assert re.fullmatch(
        r"nbguard: the bad listener failed after In\[5\] \(TypeError at .*\) and tries again later: please report it",
        first.text,
    )
    assert first.stderr == ""
    assert second.text.startswith("In[6]  +4 MiB")  # the others go on
    assert notebook.value("(Bad.calls, hasattr(sys, 'last_value'), get_ipython().last_execution_result.success)") == (
        2,
        False,
        True,
    )
    assert notebook.value("builtins._tracked['mine'][0]()")


def test_a_listener_that_goes_on_failing_is_tried_more_seldom_and_one_that_recovers_at_each_cell(notebook: Kernel) -> None:
    notebook.run(_BAD).ok()

    texts = [notebook.run("x = 1").text for _ in range(15)]

    assert [bool(text) for text in texts] == [True, *[False] * 14]
    assert notebook.value("Bad.calls") == 4  # at the first, second, fourth and eighth cell

    notebook.run("Bad.fails = False").ok()
    for _ in range(4):
        assert not notebook.run("x = 1").ok().text
    assert notebook.value("Bad.calls") == 9

    notebook.run("Bad.fails = True").ok()
    notebook.run("x = 1")
    assert notebook.value("Bad.calls") == 11


_INTERRUPTED = """
import nbguard.memory.scan.scan as inside
real = inside.timed_scan
def interrupted(notebook):
    while not os.path.exists('queued'): time.sleep(.01)
    time.sleep(.3)  # on its way to the queue
    os.kill(os.getpid(), signal.SIGINT); time.sleep(5); return real(notebook)
inside.timed_scan = interrupted
"""


def test_an_interrupt_while_a_listener_works_stops_the_cells_queued_behind(notebook: Kernel) -> None:
    notebook.run_silently(_INTERRUPTED)  # nothing is scanned after it

    first = notebook.client.execute("t = torch.ones(1 << 20); track('t', t)", stop_on_error=True)
    second = notebook.client.execute("ran = True")
    (notebook.cwd / "queued").touch()
    replies = {}
    while len(replies) < 2:
        message = notebook.client.get_shell_msg(timeout=60)
        replies[message["parent_header"]["msg_id"]] = message["content"]["status"]
    time.sleep(0.3)

    assert (replies[first], replies[second]) == ("error", "aborted")
    assert notebook.value("'ran' in globals()") is False
    notebook.run("inside.timed_scan = real").ok()
    assert "del t" not in notebook.run("del t").text
    assert notebook.value("builtins._tracked['t'][0]()")


def test_run_all_stops_at_an_error_and_debug_works_as_without_us(notebook: Kernel) -> None:
    notebook.run(_FAIL).ok()
    notebook.run("f()")

    text = notebook.run("%debug", inputs=("p count", "q")).ok().stdout
    traceback = notebook.run("%tb")

    assert "41" in text
    assert "on purpose" in traceback.stderr + traceback.stdout + str(traceback.error)


@pytest.mark.slow
def test_off_is_off_and_leaves_ipython_as_found(kernel: Kernel) -> None:
    kernel.run(PRELUDE).ok()
    kernel.run("theirs = lambda *_: None\nget_ipython().events.register('post_run_cell', theirs)").ok()
    before = kernel.value(_CALLBACKS)
    kernel.run("%load_ext nbguard").ok()
    kernel.run("%nbguard on --auto-clean-errors").ok()
    kernel.run("%gpumem cells on").ok()
    during = kernel.value(_CALLBACKS)
    kernel.run("get_ipython().events.register('post_run_cell', print)").ok()
    kernel.run("get_ipython().events.unregister('post_run_cell', print)").ok()

    kernel.run("%nbguard off").ok()

    assert kernel.run("t = torch.ones(1 << 20)").ok().bundles == []
    assert during != before
    assert during["post_run_cell"][: len(before["post_run_cell"])] == before["post_run_cell"]
    assert kernel.value(_CALLBACKS) == before


def test_unloading_forgets_everything(notebook: Kernel) -> None:
    notebook.run("t = torch.ones(1 << 20)").ok()
    notebook.run("%nbguard on --auto-clean-errors").ok()
    notebook.run("%unload_ext nbguard").ok()

    cell = notebook.run("u = torch.ones(1 << 20)").ok()

    assert cell.bundles == []
    assert notebook.value("(len(get_ipython().events.callbacks['pre_run_cell']), '_nbguard_live' in vars(get_ipython()))") == (
        0,
        False,
    )
    notebook.run("%load_ext nbguard").ok()
    assert "nothing is recorded yet" in str(notebook.run("%gpumem history").error)


def test_the_ledger_keeps_nothing_alive(notebook: Kernel) -> None:
    notebook.run("t = torch.ones(1 << 20); track('t', t)").ok()
    notebook.run("x = 1").ok()
    notebook.run("%gpumem history -o kept").ok()
    notebook.run("del t").ok()

    assert notebook.value("builtins._tracked['t'][0]()")
    assert notebook.value("type(kept).__name__") == "History"


def test_history_shows_each_cell_and_re_adds(notebook: Kernel) -> None:
    notebook.run("t = torch.ones(1 << 20)").ok()
    notebook.run("u = torch.ones(2 << 20)").ok()
    notebook.run("%gpumem cells off").ok()
    assert notebook.run("del t").ok().bundles == []

    bundle = notebook.run("%gpumem history").ok().bundles[0]

    assert re.search(r"In\[4\] +\+4 MiB +4 MiB +\+ t 4 MiB", bundle["text/plain"])
    assert re.search(r"In\[5\] +\+8 MiB +12 MiB", bundle["text/plain"])
    assert re.search(r"now +12 MiB", bundle["text/plain"])
    assert "<svg role" in bundle["text/html"]


def test_recording_without_lines(kernel: Kernel) -> None:
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard").ok()
    kernel.run("%nbguard on").ok()

    assert kernel.run("t = torch.ones(1 << 20)").ok().bundles == []
    assert re.search(r"In\[4\] +\+4 MiB", kernel.run("%gpumem history").ok().text)


def test_a_slow_look_is_not_repeated_after_cells(notebook: Kernel) -> None:
    notebook.run_silently("import nbguard.memory.cells.name_watch as inside; inside._TOO_SLOW, inside._PATIENCE = 0.0, 1")

    first = notebook.run("t = torch.ones(2 << 20)").ok().text
    second = notebook.run("u = torch.ones(1 << 22)").ok().text

    assert "new: t 8 MiB" in first
    assert re.search(
        r"In\[5\]  process memory \+1[67](\.\d)? MiB → .* · holders: %gpumem \(a scan takes \d+\.\d s here\)", second
    )


def test_a_slow_malloc_is_not_asked_again_and_changes_are_still_found(notebook: Kernel) -> None:
    """Its free pieces are what makes it slow; a limit of nothing stands for a heap with very many."""
    notebook.run("import nbguard.memory.scan.devices.counters as inside; inside._SLOW = 0.0").ok()
    for _ in range(3):
        notebook.run("x = 1").ok()

    text = notebook.run("t = torch.ones(1 << 20)").ok().text

    assert "new: t 4 MiB" in text
    assert (
        notebook.value(
            "__import__('nbguard').frontend.notebook.session.session_of(get_ipython()).recording._ledger._last.source"
        )
        == "resident"
    )


def test_without_torch_nothing_is_recorded(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    plain_kernel.run("%gpumem cells on").ok()
    assert plain_kernel.run("x = 1").ok().bundles == []

    assert plain_kernel.run("import torch").ok().bundles == []
    assert _line(plain_kernel.run("t = torch.ones(1 << 20)").ok()) == "In[5]  +4 MiB → 4 MiB · new: t 4 MiB"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%gpumem history", "nothing is recorded yet; `%nbguard on`"),
        ("%gpumem cells", "say on or off"),
        ("%gpumem cells of", "say on or off"),
        ("%nbguard onn", "there is no word 'onn': did you mean on?"),
        ("%nbguard off --auto-clean-errors", "belongs to on"),
        ("%nbguard --auto", "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line(kernel: Kernel, line: str, message: str) -> None:
    kernel.run("%load_ext nbguard").ok()

    cell = kernel.run(line)

    assert cell.error is not None
    assert cell.error[0] == "UsageError"
    assert message in cell.error[1]
    assert "Traceback" not in cell.stderr


class TestAutoClean:
    @pytest.fixture
    def notebook(self, kernel: Kernel) -> Kernel:
        """A kernel in which the errors of failed cells are cleaned at once."""
        kernel.run(PRELUDE).ok()
        kernel.run("%load_ext nbguard").ok()
        kernel.run("%nbguard on --auto-clean-errors").ok()
        return kernel

    def test_what_the_error_holds_is_freed_at_once_and_can_be_debugged(self, notebook: Kernel) -> None:
        notebook.run(_FAIL).ok()

        cell = notebook.run("f()")
        gone = notebook.value("builtins._tracked['a'][0]()")
        text = notebook.run("%debug", inputs=("p count, a", "q")).ok().stdout
        traceback = notebook.run("%tb")

        assert cell.error == ("ValueError", "on purpose")
        assert cell.text == "released 12 MiB that the error in In[5] held (%tb, %debug still work)"
        assert gone
        assert "(41, <released by %reset_gpu: Tensor 3145728 float32>)" in text
        assert "on purpose" in traceback.stderr + traceback.stdout + str(traceback.error)

    def test_a_failed_fit_leaves_nothing_on_its_learner_and_the_learner_works(self, notebook: Kernel) -> None:
        notebook.run(FAILED)

        assert notebook.value("(learn.xb, learn.pred, learn.loss, learn.loss_grad)") == ((None,), None, None, None)
        assert not notebook.value("any(gone() for gone in builtins._tracked['model'])")
        notebook.run("learn.remove_cbs(Fail); learn.fit(1)").ok()

    def test_nothing_else_that_is_stale_goes(self, notebook: Kernel) -> None:
        notebook.run("net = Net(); track('shown', net); other = learner(cbs=Fail())\nnet").ok()
        notebook.run("del net").ok()
        notebook.run("def fits():\n    try: other.fit(1)\n    except RuntimeError: pass\nfits()").ok()
        notebook.run(_FAIL).ok()

        notebook.run("f()")

        assert notebook.value("builtins._tracked['a'][0]()")
        assert not notebook.value("any(gone() for gone in builtins._tracked['shown'])")
        assert notebook.value("other.pred is not None")

    def test_what_is_still_needed_stays(self, notebook: Kernel) -> None:
        notebook.run(
            "kept = torch.ones(1 << 20)\ndef f(x):\n    y = x * 2; track('x', x); track('y', y); raise ValueError(1)"
        ).ok()

        cell = notebook.run("f(kept)")

        assert cell.text.startswith("released 4 MiB that")
        assert notebook.value("(builtins._tracked['x'][0](), builtins._tracked['y'][0]())") == (False, True)
        assert notebook.value("float(kept.sum())") == 1 << 20

    def test_an_error_that_holds_nothing_is_left_alone(self, notebook: Kernel) -> None:
        assert notebook.run("1 / 0").bundles == []

    def test_not_with_a_debugger(self, notebook: Kernel) -> None:
        notebook.run(_FAIL).ok()
        notebook.run("%pdb on").ok()
        assert notebook.run("f()", inputs=("q",)).bundles == []
        notebook.run("%pdb off\nsys.settrace(lambda *_: None)").ok()
        assert notebook.run("f()").bundles == []
        assert not notebook.value("any(gone() for gone in builtins._tracked['a'][-1:])")

        notebook.run("sys.settrace(None)").ok()
        assert notebook.run("f()").text.startswith("released 12 MiB")

    def test_not_while_a_fit_runs_in_another_thread(self, notebook: Kernel) -> None:
        notebook.run(
            "import threading\ngo, started = threading.Event(), threading.Event()\n"
            "class Waits(Callback):\n    def before_batch(self): started.set(); go.wait(60)\n"
            "running = learner(cbs=Waits())\n"
            "thread = threading.Thread(target=running.fit, args=(1,), daemon=True); thread.start(); started.wait(60)"
        ).ok()
        notebook.run(_FAIL).ok()

        assert notebook.run("f()").bundles == []

        notebook.run("go.set(); thread.join(60)").ok()
        assert notebook.run("f()").text.startswith("released")

    def test_on_without_the_flag_ends_it(self, notebook: Kernel) -> None:
        notebook.run(_FAIL).ok()
        notebook.run("%nbguard on").ok()

        assert notebook.run("f()").text.startswith("In[6] failed, and its error keeps 12 MiB alive")
