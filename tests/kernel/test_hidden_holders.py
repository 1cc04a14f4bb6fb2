"""Memory that is held in ways which Python hides: named by the real holder where any means exists, else without a command."""

from __future__ import annotations

import re

import pytest

from tests.advice import follow
from tests.kernels import Kernel

_NBYTES = (1000 * 1000 + 1000) * 4


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with a model that something is about to hold."""
    kernel.run(
        "import atexit, gc, logging.handlers, time, weakref, torch\nfrom concurrent.futures import ThreadPoolExecutor"
    ).ok()
    kernel.run("from torch import nn\n%load_ext nbguard\nclass K: pass").ok()
    kernel.run("model = nn.Linear(1000, 1000)").ok()
    return kernel


def _after_deletion(notebook: Kernel, code: str, names: str = "model") -> str:
    notebook.run(f"{code}\nNone").ok()
    return notebook.run(f"del {names}").ok().text


def test_a_function_that_runs_at_exit(notebook: Kernel) -> None:
    text = _after_deletion(notebook, "def save(m=model): ...\natexit.register(save)")
    assert "`save → default [0]` (In[4]) and `atexit callback save → default [0]`" in text
    assert text.endswith("`import atexit; atexit.unregister(save);` and `%reset_gpu save`")
    assert follow(notebook, "import atexit; atexit.unregister(save);\n%reset_gpu save") == _NBYTES


def test_a_method_that_runs_at_exit(notebook: Kernel) -> None:
    """As long as the model has a name, a report says how it is unregistered; without one nobody can write the method."""
    notebook.run("atexit.register(model.forward); None").ok()
    why = notebook.run("%gpumem why model").ok().text
    assert "import atexit; atexit.unregister(model.forward);" in why
    text = notebook.run("del model").ok().text
    assert "`atexit callback Linear.forward.__self__`" in text
    assert text.endswith("`%reset_gpu atexit callback Linear.forward`")
    assert follow(notebook, "%reset_gpu atexit callback Linear.forward") == _NBYTES


def test_an_argument_of_what_runs_at_exit(notebook: Kernel) -> None:
    text = _after_deletion(notebook, "atexit.register(print, model)")
    assert (
        text
        == "`model` was deleted, but its 3.82 MiB is still in memory, held by something that Python does not show · it goes only with the kernel"
    )


def test_a_hook_on_a_node_of_a_graph(notebook: Kernel) -> None:
    code = "w = torch.ones(3, requires_grad=True); y = w * 2\ny.grad_fn.register_hook(lambda *a, m=model: None)"
    text = _after_deletion(notebook, code)
    assert "held by `y → graph[0] → default ['m']`" in text
    assert text.endswith(" · `y = y.detach()`")
    assert follow(notebook, "y = y.detach()") == _NBYTES + 8  # and the number that its graph saved; y keeps its value


@pytest.mark.slow
@pytest.mark.whole_heap
def test_an_argument_of_a_finalizer(notebook: Kernel) -> None:
    text = _after_deletion(notebook, "keep = K(); weakref.finalize(keep, print, model)")
    assert "`weakref.finalize._registry[<finalize>].args[0]`" in text
    line = "%reset_gpu weakref.finalize._registry[<finalize>]"
    assert text.endswith(f" · `{line}`")
    assert follow(notebook, line) == _NBYTES
    assert notebook.value("type(keep).__name__") == "K"


def test_records_that_a_logging_handler_keeps_back(notebook: Kernel) -> None:
    code = (
        "log = logging.getLogger('a.b'); log.addHandler(logging.handlers.MemoryHandler(1000, flushLevel=99))\n"
        "def fail(m): raise KeyError\ntry: fail(model)\nexcept KeyError: log.exception('oh')"
    )
    text = _after_deletion(notebook, code)
    line = "import logging; logging.getLogger('a.b').handlers[0].buffer.clear()"
    assert "`logging.getLogger('a.b').handlers[0].buffer[0].exc_info[2] → fail → m`" in text
    assert text.endswith(f" · `{line}`")
    assert follow(notebook, line) == _NBYTES
    assert notebook.value("logging.getLogger('a.b') is log")


def test_an_attribute_of_a_logger_is_deleted_and_no_other_logger_has_part_in_it(notebook: Kernel) -> None:
    """It was freed only with the kernel, and with a frame that led to a logger all 150 of a notebook were in one row."""
    notebook.run("for n in range(9): logging.getLogger(f'many.{n}')\nlog = logging.getLogger('exp'); log.history = [1]").ok()
    text = _after_deletion(notebook, "logging.getLogger('train').data = model")
    line = "import logging; del logging.getLogger('train').data"
    assert text.endswith(f" · `{line}`")
    notebook.run("def f(): logger = logging.getLogger('many.3'); raise KeyError\nf()", stop_on_error=False)

    rows = notebook.value("[row.label for row in __import__('nbguard').report().devices[0].holders if row.retained]")

    assert rows == ["logging.getLogger('train')"]
    assert follow(notebook, line) == _NBYTES
    assert notebook.value("log.history") == [1]


@pytest.mark.whole_heap
def test_no_line_empties_a_register_of_the_standard_library(notebook: Kernel) -> None:
    """`sys.modules.clear()` was printed of a tensor in it."""
    code = "import re, json\nsys.modules['kept'] = model.weight.detach(); re.kept = {1: sys.modules['kept']}; json.kept = [re.kept[1]]"
    notebook.run("import sys").ok()
    _after_deletion(notebook, code)

    lines = notebook.value(
        "[one.command for one in __import__('nbguard').report().findings] + [one.command for one in __import__('nbguard').notices()]"
    )
    text = notebook.run("%gpumem --all").ok().text + notebook.run("%gpumem why sys.modules['kept']").ok().text

    assert not [line for line in lines if ".clear()" in line]
    assert ".clear()" not in text
    assert notebook.value("len(sys.modules)") > 100


def test_work_that_waits_in_an_executor(notebook: Kernel) -> None:
    code = "pool = ThreadPoolExecutor(1); pool.submit(time.sleep, 600); pool.submit(print, model)"
    text = _after_deletion(notebook, code)
    argument = r"\S*(?:args|task\[1\])\[0\]"  # in a list up to CPython 3.12; since 3.14 a work item has function and arguments as its task
    assert re.search(rf"`pool\._work_queue → {argument}` \(In\[4\]\)", text), (
        text
    )  # and by its thread, which has the queue, too
    assert text.endswith("`pool.shutdown(wait=False, cancel_futures=True)`")
    assert "threading._active" not in text
    assert follow(notebook, "pool.shutdown(wait=False, cancel_futures=True)") == _NBYTES
