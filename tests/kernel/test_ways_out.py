"""Each kind of holder that a report can show comes with a line that ends it: followed here, in a kernel, one after the other."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

import nbguard.memory.scan
from nbguard.memory.core.facts import CacheKind, Registry, RootKind
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
    observers = []
class Table:
    table = {}
class Kept:
    pass
HOOKS = []
def observe(callback): HOOKS.append(callback)
"""
_SETUP = """
import asyncio, atexit, concurrent.futures as futures, contextvars, functools, gc, logging.handlers, os, signal, sys
import threading, time, types, weakref, torch, queue, pandas, ipywidgets
import matplotlib.pyplot as plt
from torch import nn
os.makedirs('some-packages', exist_ok=True)
sys.path[:0] = [os.path.abspath('some-packages'), os.getcwd()]
import keepinglib as lib, bigdata
__import__('builtins')._made = []
def made():
    model = nn.Linear(1000, 1000); _made.append((weakref.ref(model.weight), ''))
    return model
def tensor():
    made = torch.ones(1001000, requires_grad=True); _made.append((weakref.ref(made), ''))
    return made
class Held:
    def __init__(self):
        self.model = made(); self.final = weakref.finalize(self, self.close)
    def close(self): self.model = None
class Owner:
    def __init__(self): self.model = made()
    def close(self): self.model = None
class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None): return function(*args, **(kwargs or {}))
span = contextvars.ContextVar('span')
def in_a_context():
    context = contextvars.copy_context(); context.run(span.set, made())
    return context
async def job(model): await asyncio.sleep(1000)
async def job_with_a_context(): span.set(made()); await asyncio.sleep(1000)
def keep(model=None):
    model = made()
    def kept(*_): model
    return kept
def wait(model): told.wait()
def wait_in_a_context(): span.set(made()); told.wait()
def fail(): model = made(); raise KeyError
def stepped(model): yield 1; yield model
told = threading.Event()
__import__('builtins').made = made
live = nn.Linear(10, 10)
state = lib.GradientState()
"""
# In the kernel: which models and tensors are alive, by the case that has made them; and of one look the commands by the labels
# that findings name, and (kind, cache, registry, line) of each root.
_LOOK = """
def _note(kind):
    new = [n for n, (reference, of) in enumerate(_made) if not of and reference() is not None]
    _made[:] = [(reference, of or kind) for reference, of in _made]
    return len(new)
def _alive():
    return [kind for reference, kind in _made if reference() is not None]
def _look():
    from nbguard.memory.core.analysis import Analysis
    from nbguard.memory.core.references.explain import explain_root
    from nbguard.memory.reports.findings import find
    from nbguard.memory.scan.scan import Notebook, scan
    shell = get_ipython()
    facts = scan(Notebook(shell=shell, namespace=shell.user_ns)).facts
    told = {f.sentence.partition(' (')[0]: f.command for f in find(Analysis(facts))}
    ways = {r.label: explain_root(facts, r.label).paths for r in facts.graph.roots}
    lines = {label: paths[0].advice.command or paths[0].advice.effect for label, paths in ways.items() if paths}
    kinds = {r.label: (r.kind, r.cache, r.registry) for r in facts.graph.roots}
    return told, {label: (*kinds[label], line) for label, line in lines.items()}
__import__('builtins').__dict__.update(_look=_look, _note=_note, _alive=_alive)
"""


class Case(NamedTuple):
    """A way to keep a model, and the root that a report shows of it."""

    code: str  # keeps it
    label: str  # of the root, or how its label begins
    act: str = ""  # what the words mean that stand there instead of a line: the work ends
    meanwhile: str = ""  # code that runs beside the line
    is_cell: bool = False  # the code has to be a cell, for IPython to keep what it shows or raises


_JOIN = "told.set(); time.sleep(0.2); told.clear()"

CASES = {
    "name": Case("x = made()", "x"),
    "generator": Case("def steps(): m = made(); yield 1; yield 2\ng = steps(); next(g);", "g"),
    "displayed result": Case("made()", "Out[", is_cell=True),
    "last error": Case("fail()", "last error", is_cell=True),
    "running function": Case("threading.Thread(target=wait, args=(made(),), name='w').start()", "running wait()", act=_JOIN),
    "script": Case("get_ipython().run_line_magic('run', 'script.py'); del kept", "%run script.py", is_cell=True),
    "stored value": Case("kept = made(); get_ipython().run_line_magic('store', 'kept'); del kept", "%store kept", is_cell=True),
    "figure": Case("plt.switch_backend('agg'); f = plt.figure(); f.kept = made(); del f", "pyplot figure"),
    "list of garbage": Case("gc.garbage.append(made())", "gc.garbage"),
    "cycle": Case("gc.disable(); o = Owner(); o.me = o; del o", "unreachable cycles"),
    "hook on its own tensor": Case("y = tensor() * 2; y.register_hook(lambda g, y=y: y); del y", "unreachable C++ cycle"),
    "gradients with a graph": Case(
        "m = made(); m(torch.ones(2, 1000)).square().sum().backward(create_graph=True); del m", "unreachable C++ cycle"
    ),
    "attribute of all instances of a class": Case("state.active = made(); del state", "keepinglib.GradientState"),
    "list of a class": Case("lib.Hub.observers.append(made())", "keepinglib.Hub"),
    "dict of a class": Case("lib.Table.table['a'] = made()", "keepinglib.Table"),
    "attribute of a class": Case("lib.Kept.model = made()", "keepinglib.Kept"),
    "hook of a library": Case("m = made(); lib.observe(lambda m=m: m); lib.observe(lambda m=m: m); del m", "keepinglib.HOOKS"),
    "global of the user's module": Case("bigdata.table = made()", "bigdata.table"),
    "finalizer": Case("Held(); None", "weakref.finalize"),
    "context": Case("context = in_a_context()", "context"),
    "context of a task": Case("asyncio.create_task(job_with_a_context(), name='a'); await asyncio.sleep(0)", "task a"),
    "context of a timer": Case("asyncio.get_running_loop().call_later(1000, print, 1, context=in_a_context());", "timer print"),
    "context of a thread": Case(
        "threading.Thread(target=wait_in_a_context).start(); time.sleep(0.1)", "context of a thread", act=_JOIN
    ),
    "timer of a thread": Case(
        "t = threading.Timer(999, print, args=(made(),)); t.name = 'late'; t.start(); del t", "thread late"
    ),
    "closure of a timer": Case("t = threading.Timer(999, keep()); t.name = 'later'; t.start(); del t", "thread later"),
    "hook for errors nobody handles": Case("sys.unraisablehook = keep()", "sys.unraisablehook function"),
    "hook for errors in threads": Case("threading.excepthook = keep()", "threading.excepthook function"),
    "global of Python": Case("__import__('builtins').thing = made()", "builtins.thing"),
    "global of a library": Case("lib.model = made()", "keepinglib.model"),
    "cache of a function of a module": Case(
        "bigdata.load = functools.cache(lambda key: made()); bigdata.load(3);", "bigdata.load"
    ),
    "hook on a live model": Case("live.register_forward_hook(lambda m, a, o, kept=made(): None);", "live"),
    "hook on a model of a module": Case(
        "bigdata.net = nn.Linear(2, 2); bigdata.net.register_forward_hook(lambda m, a, o, kept=made(): None);", "bigdata.net"
    ),
    "queue": Case("q = queue.Queue(); q.put(made())", "q"),
    "value of a thread": Case("local = threading.local(); local.model = made()", "local"),
    "generator in a list": Case("steps = [g(made()) for g in (stepped,)]; next(steps[0]);", "steps"),
    "table with an object": Case("df = pandas.DataFrame({'m': [made(), 1]})", "df"),
    "observer of a widget": Case(
        "slider = ipywidgets.IntSlider(); slider.observe(lambda change, kept=made(): None, 'value')", "slider"
    ),
    "task": Case("asyncio.create_task(job(made()), name='b'); await asyncio.sleep(0)", "task b"),
    "task with a name": Case("later = asyncio.create_task(job(made())); await asyncio.sleep(0)", "later"),
    "task in a list": Case("tasks = [asyncio.create_task(job(made()))]; await asyncio.sleep(0)", "tasks"),
    "timer": Case("asyncio.get_running_loop().call_later(1000, made().forward);", "timer forward"),
    "timer with a name": Case("timer = asyncio.get_running_loop().call_later(1000, made().forward);", "timer"),
    "executor of threads": Case(
        "pool = futures.ThreadPoolExecutor(1); pool.submit(time.sleep, 600); pool.submit(print, made());", "pool"
    ),
    "executor of processes": Case(
        "end, write = os.pipe(); processes = futures.ProcessPoolExecutor(1); "
        "[processes.submit(os.read, end, 1) for _ in range(3)]; processes.submit(len, made());",
        "processes",
        meanwhile="threading.Timer(0.2, os.write, (write, b'123')).start()\n",
    ),
    "future": Case("future = futures.Future(); future.set_result(made())", "future"),
    "method that runs at exit": Case("atexit.register(Owner().close);", "atexit callback Owner.close"),
    "partial that runs at exit": Case("atexit.register(functools.partial(print, made()));", "atexit callback print"),
    "closure that runs at exit": Case("atexit.register(keep());", "atexit callback kept"),
    "argument of what runs at exit": Case(
        "atexit.register(print, made());", "libraries (tuple)", act="atexit.unregister(print)"
    ),
    "signal handler": Case("signal.signal(signal.SIGUSR1, keep());", "signal handler SIGUSR1"),
    "profile function": Case("sys.setprofile(keep())", "sys.setprofile function"),
    "callback of the collector": Case("gc.callbacks.append(keep())", "gc callback kept"),
    "records of a log": Case(
        "log = logging.getLogger('a.b'); log.addHandler(logging.handlers.MemoryHandler(1000, flushLevel=99)); "
        "log.error('oh', made())",
        "logging.getLogger('a.b').handlers[0].buffer",
    ),
    "attribute of a logger": Case("logging.getLogger('c.d').kept = made()", "logging.getLogger('c.d')"),
    "mode of torch": Case("mode = Mode(); mode.model = made(); mode.__enter__(); del mode", "torch mode Mode"),
    "hooks on saved tensors": Case(
        "torch.autograd.graph.saved_tensors_hooks(keep(), print).__enter__()", "saved_tensors_hooks"
    ),
    "event of IPython": Case("get_ipython().events.register('post_run_cell', keep())", "IPython event post_run_cell"),
    "magic": Case("get_ipython().register_magic_function(keep(), magic_name='kept')", "%kept"),
    "value of a context variable": Case("lib.last.set(made());", "context variable last"),
}
ROOTS = {
    "user_roots": ("name",),
    "module_roots": ("global of the user's module",),
    "output_roots": ("displayed result",),
    "running_roots": ("running function",),
    "error_roots": ("last error", ""),  # a debugger that has ended: tests/kernel/test_oom.py and the zoo
    "final_roots": ("",),  # of an error that ends its process: tests/jobs/test_cards.py
    "_garbage": ("list of garbage",),
    "_interpreter": ("signal handler", "profile function", "hook for errors nobody handles", "callback of the collector"),
    "_at_exit": ("method that runs at exit",),
    "logger_roots": ("records of a log", "attribute of a logger"),
    "_context_values": ("value of a context variable",),
    "_torch": ("mode of torch", "hooks on saved tensors"),
    "_figures": ("figure",),
    "_scripts": ("script",),
    "_stored": ("stored value",),
    "_ipython": ("event of IPython", "magic"),
    "waiting_roots": ("task", "timer"),
    "ending_roots": ("",),  # goes by itself
    "_named_root": ("list of a class",),
    "_root_of": ("executor of threads",),
    "unnamed_roots": ("context of a thread", "argument of what runs at exit"),
    "orphan_roots": ("cycle", "", ""),  # beside code that runs, and where not all was looked into: nothing is known
    "_cycles": ("hook on its own tensor", ""),  # of C++ as well: tests/kernel/test_hidden_holders.py
}
"""By the function of nbguard.memory.scan that makes a root: the case of each, in any order."""


def test_each_place_that_makes_a_root_has_a_case() -> None:
    calls = Counter[str]()
    for file in Path(nbguard.memory.scan.__file__).parent.rglob("*.py"):
        functions = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
        for function in functions:
            names = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
            calls[function.name] += sum(name in ("LiveRoot", "_hook") for name in names) if function.name != "_hook" else 0

    assert {name: len(cases) for name, cases in ROOTS.items()} == {name: count for name, count in calls.items() if count}
    assert {case for cases in ROOTS.values() for case in cases} - {""} <= CASES.keys()


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with a library and a module of the user's, which keep things."""
    folder = kernel.cwd / "some-packages"
    folder.mkdir()
    (folder / "keepinglib.py").write_text(_LIBRARY)
    (kernel.cwd / "bigdata.py").write_text("table = None\n")
    (kernel.cwd / "script.py").write_text("kept = __import__('builtins').made()\n")
    kernel.run_silently("import importlib, weakref; importlib.reload(weakref)")  # else no look sees the class of finalizers
    kernel.run(_SETUP).ok()
    kernel.run("%load_ext nbguard\n%gpumem").ok()
    return kernel


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.whole_heap
def test_every_kind_of_holder_has_a_line_that_ends_it(notebook: Kernel) -> None:
    """All are made, one look is taken, and each line is followed: the model of its own case goes, and no other."""
    notebook.printed = None  # a fork has neither threads nor an event loop that turns
    notebook.run_silently(_LOOK)
    apart = (
        "profile function",
        "hook for errors in threads",
    )  # under the one nobody asks what runs at exit; threads keep the other
    seen = _follow_each(notebook, {kind: case for kind, case in CASES.items() if kind not in apart})
    seen |= _follow_each(notebook, {kind: CASES[kind] for kind in apart})

    assert seen >= {*get_args(RootKind), *get_args(CacheKind), *get_args(Registry)}
    assert notebook.value("live(torch.ones(1, 10)).shape == (1, 10)")


def _follow_each(notebook: Kernel, cases: dict[str, Case]) -> set[str]:
    """Follow the line of each case, and return the kinds, caches and registries of all roots that were shown."""
    for kind, case in cases.items():
        (notebook.run if case.is_cell else notebook.run_silently)(case.code)
        assert notebook.value(f"_note({kind!r})"), kind
    told, roots = notebook.value("_look()")
    lines: dict[str, set[str]] = {}
    targets, with_targets = [], set[str]()
    for kind, case in cases.items():
        label = next((label for label in sorted(roots, key=len) if label.startswith(case.label)), "")
        command = told.get(label) or roots.get(label, (f"no such root in {sorted(roots)}",))[-1]
        if case.act and ("wait" in command or command.startswith("freed")):
            command = case.act
        if command.startswith("%reset_gpu "):
            targets.append(command.removeprefix("%reset_gpu "))
            with_targets.add(kind)
        else:
            lines.setdefault(case.meanwhile + command, set()).add(kind)
    stale = lines.pop("%reset_gpu", set[str]())
    lines |= (
        {f"%reset_gpu {' '.join(targets)}": with_targets} if targets else {}
    )  # as a notice joins them: a cleanup takes time
    lines |= {"%reset_gpu": stale} if stale else {}
    wrong = []
    for command, kinds in lines.items():
        before = set(notebook.value("_alive()"))
        notebook.run(command)
        if not command.startswith("%"):
            notebook.run_silently("gc.collect()")
        gone = before - set(notebook.value("_alive()"))
        if gone | {"cycle"} != kinds | {"cycle"}:  # which any cleanup collects
            wrong.append((command, gone ^ kinds))
    assert not wrong, "\n".join(map(str, wrong))
    assert not set(notebook.value("_alive()"))
    return {fact for *facts, _ in roots.values() for fact in facts}


def test_tab_completes_what_a_report_shows(notebook: Kernel) -> None:
    notebook.run_silently("Held(); lib.last.set(made());")

    def completed(code: str) -> list[str]:
        found = notebook.value(f"get_ipython().kernel.do_complete({code!r}, {len(code)})")
        return [code[: found["cursor_start"]] + match for match in found["matches"]]

    for code, path in (
        ("%reset_gpu weakref.fin", "weakref.finalize"),
        ("%reset_gpu weakref.finalize._registry[", "weakref.finalize._registry[<finalize>]"),
        ("%gpumem why context var", "context variable last"),
        ("%gpumem why context variable last.w", "context variable last.weight"),
    ):
        assert any(line.endswith(f" {path}") for line in completed(code)), code


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


_MOCK = "from unittest import mock; mm = mock.MagicMock(); mm(made());"  # its class is one of its own
_LEFT = (
    ("name", "global of the user's module", "future"),
    ("dict of a class", "executor of threads", "task with a name"),
    ("context", "value of a context variable", "finalizer"),
    ("hook of a library", "argument of what runs at exit", "call of a mock"),
)


@pytest.mark.slow
def test_a_cleanup_shows_what_ends_each_of_the_largest_that_it_leaves(notebook: Kernel) -> None:
    """The line is the one of `%gpumem`; with nothing stale there are three lines at most."""
    notebook.printed = None  # a fork has no event loop that turns
    notebook.run_silently(_LOOK)
    notebook.run_silently("small = [torch.ones(9) for _ in range(4)]; smaller = torch.ones(3)")
    for kinds in _LEFT:
        for kind in kinds:
            notebook.run_silently(_MOCK if kind == "call of a mock" else CASES[kind].code)
            notebook.value(f"_note({kind!r})")
        text = notebook.run("%reset_gpu -o outcome").ok().text
        left = notebook.value("[(h.label, h.advice.command, h.advice.effect) for h in outcome.left[:3]]")
        told, _ = notebook.value("_look()")

        assert len(text.splitlines()) <= 3
        assert "small" not in text
        assert all((command or effect) in text for _, command, effect in left)
        for label, command, _ in left[: len(kinds)]:
            assert command == told.get(label, command)
            before = set(notebook.value("_alive()"))
            notebook.run(command or "atexit.unregister(print)").ok()
            notebook.run_silently("gc.collect()")
            assert len(before - set(notebook.value("_alive()"))) == 1, (label, command)
        assert not notebook.value("_alive()"), kinds
    assert notebook.value("live(torch.ones(1, 10)).shape == (1, 10) and len(small)") == 4


def test_why_of_a_kept_exception_frees_what_its_frames_hold(notebook: Kernel) -> None:
    """The exception stays with its message, and an object of its frames that has a name."""
    notebook.run_silently(_LOOK)
    notebook.run_silently("def broken():\n    m, known = made(), live\n    raise KeyError('kept')")
    keeping = {
        "error": "try: broken()\nexcept KeyError as e: error = e",
        "kept": "kept = []\ntry: broken()\nexcept KeyError as e: kept.append(e)",
        "sys.last_value": "broken()",
    }
    for target, code in keeping.items():
        notebook.run(code)
        notebook.value(f"_note({target!r})")
    commands = {}
    for target in ("error", "kept[0]", "sys.last_value"):
        notebook.run(f"%gpumem why {target} -o found").ok()
        commands[target] = notebook.value("{path.advice.command for path in found.paths if not path.storages_only}")

    assert commands == {
        "error": {"%reset_gpu --errors"},
        "kept[0]": {"%reset_gpu --errors"},
        "sys.last_value": {"%reset_gpu"},
    }
    notebook.run("%reset_gpu --errors").ok()
    assert not {"error", "kept"}.intersection(notebook.value("_alive()"))
    notebook.run("%reset_gpu").ok()
    assert not notebook.value("_alive()")
    assert notebook.value("[type(e).__name__ + e.args[0] for e in (error, *kept)]") == ["KeyErrorkept"] * 2
