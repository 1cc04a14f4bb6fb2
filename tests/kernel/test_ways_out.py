"""Each kind of holder that a report can show comes with a line that ends it: followed here, in a kernel, one after the other."""

from __future__ import annotations

import pytest

from tests.advice import follow, held
from tests.kernels import Kernel

_NBYTES = (1000 * 1000 + 1000) * 4
_LIBRARY = """
import contextvars
last = contextvars.ContextVar('last')
class GradientState:
    _shared_state = {}
    def __init__(self): self.__dict__ = self._shared_state
class Hub:
    observers, table = [], {}
HOOKS = []
def observe(callback): HOOKS.append(callback)
"""
_SETUP = """
import contextvars, gc, os, sys, types, weakref, torch
from torch import nn
os.makedirs('some-packages', exist_ok=True)
sys.path[:0] = [os.path.abspath('some-packages'), os.getcwd()]
import keepinglib as lib, bigdata
def made(): return nn.Linear(1000, 1000)
class Held:
    def __init__(self):
        self.model = made(); self.final = weakref.finalize(self, self.close)
    def close(self): self.model = None
live = nn.Linear(10, 10)
state = lib.GradientState()
"""
_FINDINGS = "[(f.sentence.partition(' (')[0], f.command) for f in __import__('nbguard').report().findings]"

CASES = {
    "attribute of all instances of a class": ("state.active = made(); del state", "keepinglib.GradientState"),
    "list of a class": ("lib.Hub.observers.append(made())", "keepinglib.Hub"),
    "dict of a class": ("lib.Hub.table['a'] = made()", "keepinglib.Hub"),
    "attribute of a class": ("lib.Hub.model = made()", "keepinglib.Hub"),
    "hook of a library": ("m = made(); lib.observe(lambda m=m: m); lib.observe(lambda m=m: m); del m", "keepinglib.HOOKS"),
    "global of the user's module": ("bigdata.table = made()", "bigdata.table"),
    "finalizer": ("Held(); None", "weakref.finalize"),
    "value of a context variable": ("lib.last.set(made());", "context variable last"),
    "gradients with a graph": ("m = made(); m(torch.ones(2, 1000)).square().sum().backward(create_graph=True); del m", ""),
    "hook on its own tensor": ("y = torch.ones(1001000, requires_grad=True) * 2; y.register_hook(lambda g, y=y: y); del y", ""),
}


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with a library and a module of the user's, which keep things."""
    folder = kernel.cwd / "some-packages"
    folder.mkdir()
    (folder / "keepinglib.py").write_text(_LIBRARY)
    (kernel.cwd / "bigdata.py").write_text("table = None\n")
    kernel.run(_SETUP).ok()
    kernel.run("%load_ext nbguard\n%gpumem").ok()
    return kernel


def test_every_kind_of_holder_has_a_line_that_ends_it(notebook: Kernel) -> None:
    stays = held(notebook)
    for kind, (code, label) in CASES.items():
        notebook.run_silently(code)
        nbytes = held(notebook) - stays
        assert nbytes >= _NBYTES, kind
        commands = dict(notebook.value(_FINDINGS)) if label else {"": "%reset_gpu"}
        assert commands.get(label), (kind, commands)

        follow(notebook, commands[label])

        assert held(notebook) == stays, (kind, commands[label])
        assert notebook.value("live(torch.ones(1, 10)).shape == (1, 10) and lib.Hub.table == {}"), kind


def test_tab_completes_what_a_report_shows(notebook: Kernel) -> None:
    notebook.run_silently("Held(); lib.last.set(made());")

    def completed(code: str) -> list[str]:
        found: list[str] = notebook.value(f"get_ipython().kernel.do_complete({code!r}, {len(code)})['matches']")
        return found

    for code, path in (
        ("%reset_gpu weakref.fin", "weakref.finalize"),
        ("%reset_gpu weakref.finalize._registry[", "weakref.finalize._registry[<finalize>]"),
        ("%gpumem why context var", "context variable last"),
        ("%gpumem why context variable last.w", "context variable last.weight"),
    ):
        assert path in completed(code), code


@pytest.mark.parametrize(
    ("register", "times"),
    [
        ("def hook(m, a, o, old=old): pass\nfor _ in range(5): live.register_forward_hook(hook)\ndel hook", "5 times"),
        ("for _ in range(5): live.register_forward_hook(lambda m, a, o, old=old: None)", "4 more"),
    ],
)
def test_hooks_that_keep_a_deleted_model_go_and_the_model_they_are_on_stays(
    notebook: Kernel, register: str, times: str
) -> None:
    stays = held(notebook)
    notebook.run(f"old = made()\n{register}").ok()
    text = notebook.run("del old").ok().text

    assert times in text
    command = text.rpartition("· `")[2].removesuffix("`")
    assert follow(notebook, command) == _NBYTES

    assert held(notebook) == stays
    assert notebook.value("live(torch.ones(1, 10)).shape == (1, 10) and len(live._forward_hooks)") == 0
