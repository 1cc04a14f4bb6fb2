"""Registries of Python, IPython, torch, matplotlib and the event loop, which keep objects out of any name's reach.

`cache` roots are copies that their owner can do without (a script's old globals, the variables that `%store` wrote to disk): a
cleanup may let them go. `library` roots are in force: they are reported, with the line that ends them.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import gc
import logging
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nbguard.cell_names import cell_names
from nbguard.memory.core.facts import RootKind
from nbguard.memory.scan.heap.kinds import (
    Types,
    attributes_of,
    module_namespace,
    module_namespaces,
    name_of,
    namespace_of,
)
from nbguard.memory.scan.heap.referents import Referents
from nbguard.memory.scan.roots.frames import DISPATCH, LiveRoot, frame_locals
from nbguard.memory.scan.roots.tracebacks import PDB_VARIABLES

# --- Things that loggers keep, which the register of Python's `logging` has for ever: their attributes, and their handlers'


_OF_LOGGERS = frozenset({"name", "level", "parent", "propagate", "handlers", "disabled", "filters", "manager", "_cache"})
"""Attributes of `logging`'s own."""
_OF_LOGGING: Any = {"kind": "library", "module": "logging", "registry": "logger"}
_PARTS = ("handlers", "filters")
_CONTAINERS = Types((list, dict, set, deque))


def logger_roots() -> Iterator[LiveRoot]:
    """Yield the loggers with attributes of other code, and the collections of the handlers and filters of all the others.

    A handler that keeps records back may keep the frames of an error with each.
    """
    for name, logger in {"": logging.root, **logging.root.manager.loggerDict}.items():
        if type(logger) is logging.PlaceHolder:
            continue
        label, attributes = f"logging.getLogger({name!r})", attributes_of(logger) or {}
        if any(key not in _OF_LOGGERS and type(value) not in _PLAIN for key, value in attributes.items()):
            yield LiveRoot(label=label, objects=(logger,), what="attributes of a logger", **_OF_LOGGING)
            continue
        for parts in _PARTS:
            listed = attributes.get(parts)
            for place, part in enumerate(listed if type(listed) is list else ()):
                for key, value in (attributes_of(part) or {}).items():
                    if type(value) in _CONTAINERS and value:
                        path = f"{label}.{parts}[{place}].{key}"
                        what = f"records that a {name_of(type(part))} keeps back"
                        yield LiveRoot(label=path, objects=(value,), what=what, **_OF_LOGGING)


# --- The notebook's names and its output history, as roots.


_UNDERSCORES = ("_", "__", "___")


def user_roots(
    namespace: dict[str, Any], hidden: dict[str, Any], out: dict[int, Any], cells: Cells, words: Callable[[Any], str]
) -> list[LiveRoot]:
    """Return a root for each name that is the user's own: not IPython's, or rebound by the user since.

    `words` describes an object.
    """
    roots = []
    for name, value in list(namespace.items()):
        if type(name) is not str or (name in hidden and hidden[name] is value) or _is_output_name(name, value, out):
            continue
        roots.append(LiveRoot(kind="name", label=name, objects=(value,), cell=cells.birth(name), what=words(value)))
    return roots


def _is_output_name(name: str, value: Any, out: dict[int, Any]) -> bool:
    """Say whether a name is IPython's alias of a displayed result (`_`, `_12`) rather than the user's variable."""
    if name in ("_oh", "Out", "In", "_ih", "_dh", PDB_VARIABLES):
        return True
    if name[:1] == "_" and name[1:].isdigit():
        return out.get(int(name[1:])) is value
    return name in _UNDERSCORES and any(value is result for result in out.values())


def output_roots(places: list[tuple[str, Any]], out: dict[int, Any], words: Callable[[Any], str]) -> list[LiveRoot]:
    """Return a root for each displayed result that IPython still holds, however many places hold it."""
    by_id: dict[int, tuple[str, int | None, Any]] = {}
    for number, value in list(out.items()):
        by_id.setdefault(id(value), (f"Out[{number}]", number, value))
    for label, value in places:
        by_id.setdefault(id(value), (label, None, value))
    return [
        LiveRoot(kind="out", label=label, objects=(value,), cell=cell, what=words(value))
        for label, cell, value in by_id.values()
    ]


def output_places(shell: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (namespace, name) of every place besides `Out` where IPython keeps a displayed result."""
    names = [*_UNDERSCORES, *(f"_{number}" for number in shell.user_ns.get("_oh", ()))]
    for namespace in (shell.user_ns, shell.user_ns_hidden):
        yield from ((namespace, name) for name in names if name in namespace)
    for owner in output_owners(shell):
        names = ["result"] if owner is not shell.displayhook else [*_UNDERSCORES]
        yield from ((owner.__dict__, name) for name in names if name in owner.__dict__)


def output_owners(shell: Any) -> list[Any]:
    """Return IPython's objects whose attributes are displayed results: since Python 3.13 they refer to them themselves."""
    results = (shell.last_execution_result, getattr(shell.displayhook, "exec_result", None))
    return [shell.displayhook, *(result for result in results if result is not None)]


def module_roots(referents: Referents, namespace: dict[str, Any]) -> list[LiveRoot]:
    """Return a root for each global of the user's own modules (but the one whose globals are the namespace)."""
    roots = []
    for module_name, module_globals in referents.kinds.modules.items():
        if referents.is_users_file(module_globals.get("__file__")) and module_globals is not namespace:
            kind: RootKind = "module"
            roots += [
                LiveRoot(
                    kind=kind,
                    label=f"{module_name}.{name}",
                    objects=(value,),
                    what="global of your module",
                    module=module_name,
                )
                for name, value in list(module_globals.items())
                if type(value) is not types.ModuleType and not name.startswith("__")
            ]
    return roots


class Cells:
    """The cells that bound each name last, read from the inputs of the session (IPython's `In`).

    `unbound`: the names that a cell did not come to bind as it failed, by its number. `unsaid`: those that a cell bound, as by
    `%run`, though its source does not.
    """

    def __init__(
        self,
        inputs: list[str],
        unbound: Mapping[int, frozenset[str]] | None = None,
        unsaid: Mapping[int, frozenset[str]] | None = None,
    ) -> None:
        self._inputs = inputs
        self._unbound, self._unsaid = unbound or {}, unsaid or {}
        self._bound: dict[str, int] | None = None

    def birth(self, name: str) -> int | None:
        """Return the number of the last cell that binds `name`, or None."""
        if self._bound is None:
            self._bound = {}
            for number, source in enumerate(self._inputs):
                names = cell_names(source) if type(source) is str else None
                if names is not None:
                    bound = names.bound - self._unbound.get(number, frozenset()) | self._unsaid.get(number, frozenset())
                    self._bound |= dict.fromkeys(bound, number)
        return self._bound.get(name)


GARBAGE = "gc.garbage"
_PLAIN = Types((str, bytes, int, float, bool, type(None)))
_WITHOUT_TENSORS = frozenset({"parent_header", "shell_parent", "shell_parent_ident", "command_cycle", "decimal_context"})
"""Context variables of ipykernel and marimo, which are in force while a cell runs, and Python's own for decimals."""


def registry_roots(shell: Any, is_users: Callable[[object], bool], is_experiment: Callable[[object], bool]) -> list[LiveRoot]:
    """Return a root for each thing that is registered somewhere.

    `is_users` tells functions of the user's own, `is_experiment` Learners, models and the like, whose methods count as well.

    A library's own registrations (IPython's events, signal handlers) lead to half the process and explain nothing.
    """
    roots = [*_garbage(), *_torch(), *_figures(), *logger_roots(), *_context_values({} if shell is None else shell.user_ns)]
    if shell is not None:
        roots += [*_scripts(shell), *_stored(shell)]
    hooks = [*_interpreter(), *(() if shell is None else _ipython(shell))]
    roots += _at_exit({} if shell is None else shell.user_ns, is_users, is_experiment)
    return roots + [root for root in hooks if is_users(root.objects[0])]


def _garbage() -> Iterator[LiveRoot]:
    if gc.garbage:
        yield LiveRoot(
            kind="cache",
            label=GARBAGE,
            objects=tuple(gc.garbage),
            what="collected, but kept for debugging (gc.DEBUG_SAVEALL)",
            cache="garbage",
        )


def _interpreter() -> Iterator[LiveRoot]:
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        if callable(handler):
            name = signal.Signals(number).name
            ended_by = f"signal.signal(signal.{name}, signal.SIG_DFL)"
            yield _hook(f"signal handler {name}", handler, ended_by, f"import signal; {ended_by};")  # `;`: else Out has it
    for name, hook in (("profile", sys.getprofile()), ("trace", sys.gettrace())):
        if hook is not None:
            yield _hook(f"sys.set{name} function", hook, f"sys.set{name}(None)", f"import sys; sys.set{name}(None)")
    threading: Any = sys.modules["threading"]
    for name, function, default in (
        ("sys.excepthook", sys.excepthook, "sys.__excepthook__"),
        ("sys.unraisablehook", sys.unraisablehook, "sys.__unraisablehook__"),
        ("threading.excepthook", threading.excepthook, "threading.__excepthook__"),
    ):
        line = f"{name} = {default}"
        yield _hook(f"{name} function", function, line, f"import {name.partition('.')[0]}; {line}")
    for place, callback in enumerate(gc.callbacks):
        line = f"import gc; gc.callbacks.pop({place});"
        yield _hook(f"gc callback {callback_name(callback)}", callback, "removing it from gc.callbacks", line)


class _Listing:
    """Notes the objects that it is compared with, and is equal to nothing."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __eq__(self, other: object) -> bool:
        self.seen.append(other)
        return False

    __hash__ = None  # type: ignore[assignment]

    def may_run(self, frame: types.FrameType, event: str, _: object) -> None:
        """Stop any other function of Python's before its first line: a profile function that raises ends the call."""
        if event == "call" and frame.f_code is not _Listing.__eq__.__code__:
            raise _UsersCodeError


class _UsersCodeError(Exception):
    """Ends a comparison that would have run code of the user's."""


def _at_exit(
    namespace: dict[str, Any], is_users: Callable[[object], bool], is_experiment: Callable[[object], bool]
) -> Iterator[LiveRoot]:
    """Yield the functions that are to run when the process ends; not their arguments, which Python shows to nobody.

    `atexit` keeps them in C (CPython 3.10 to 3.14), and compares each with the function to be unregistered. Functions and
    methods leave the answer to the other side, which takes note of them. An object with an `__eq__` of its own would run that:
    it is stopped before its first line, and the list ends there. Under a profiler, whose place that takes, nothing is listed.
    """
    if sys.getprofile() is not None:
        return
    listing = _Listing()
    try:
        sys.setprofile(listing.may_run)
        atexit.unregister(listing)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001, S110 - a callable that cannot be compared: neither it nor those after it are known
        pass
    finally:
        sys.setprofile(None)
    names = {id(value): name for name, value in list(namespace.items()) if type(name) is str and not name.startswith("_")}
    for function in listing.seen:
        behind = called(function)
        owner = behind.__self__ if type(behind) is types.MethodType else None
        bound = (owner, *_arguments(function))
        if not is_users(behind) and not any(map(is_experiment, bound)):
            continue
        label = f"atexit callback {'' if owner is None else f'{name_of(type(owner))}.'}{callback_name(behind)}"
        written = names.get(id(function), "")
        if not written and function is behind and owner is not None and id(owner) in names:
            written = f"{names[id(owner)]}.{callback_name(function)}"
        line = f"import atexit; atexit.unregister({written});" if written else ""
        words = f"ended by atexit.unregister({written})" if written else "runs when the process ends"
        yield LiveRoot(kind="library", label=label, objects=(function,), what=words, ended_by=line, registry="atexit")


def called(function: Any) -> Any:
    """Return the function or method behind a `partial`, or behind several."""
    while type(function) is functools.partial:
        function = function.func
    return function


def _arguments(function: Any) -> Iterator[Any]:
    """Yield the arguments that `partial` has bound, of one behind another, too."""
    while type(function) is functools.partial:
        yield from (*function.args, *function.keywords.values())
        function = function.func


def _context_values(namespace: dict[str, Any]) -> Iterator[LiveRoot]:
    """Yield the values of context variables here: the context keeps them, whoever has the variable.

    An error reporter keeps the last exception so, a tracer its span. The line that ends it finds the variable by its name, as
    a library need not have made it a global.
    """
    values = [(variable, value) for variable, value in contextvars.copy_context().items() if _is_of_interest(variable, value)]
    names = _names_of({id(variable) for variable, _ in values}, namespace) if values else {}
    for variable, value in values:
        is_it = f"v.name == {variable.name!r} and type(v.get()).__name__ == {name_of(type(value))!r}"
        otherwise = f"import contextvars; [v.set(None) for v in contextvars.copy_context() if {is_it}];"
        yield LiveRoot(
            kind="library",
            label=f"context variable {variable.name}",
            objects=(value,),
            what=f"value of a context variable, {name_of(type(value))}",
            ended_by=names.get(id(variable), otherwise),
        )


def _is_of_interest(variable: contextvars.ContextVar[Any], value: object) -> bool:
    return type(variable.name) is str and type(value) not in _PLAIN and variable.name not in _WITHOUT_TENSORS


def _names_of(variables: set[int], namespace: dict[str, Any]) -> dict[int, str]:
    """Return, by id, the line that sets each of these variables to None, by a name of the notebook or a module's global."""
    found: dict[int, str] = {}
    for module, names in {"": namespace, **module_namespaces()}.items():
        if variables.isdisjoint(map(id, list(names.values()))):  # in C: the modules have a quarter of a million globals
            continue
        for name, value in list(names.items()):
            if id(value) in variables and type(name) is str and module != "__main__":
                written = f"import {module}; {module}.{name}" if module else name
                found.setdefault(id(value), f"{written}.set(None);")  # `;`: else Out has the token, and with it the value
    return found


def _hook(label: str, hook: Any, ended_by: str, line: str = "") -> LiveRoot:
    """Return the root of something registered; `line` ends it as it stands, `ended_by` says so in short."""
    return LiveRoot(kind="library", label=label, objects=(hook,), what=f"ended by {ended_by}", ended_by=line or ended_by)


def _torch() -> Iterator[LiveRoot]:
    for module, what in (("torch.overrides", "function"), ("torch.utils._python_dispatch", "dispatch")):
        modes: list[Any] = getattr(sys.modules.get(module), f"_get_current_{what}_mode_stack", list)()
        for mode in modes:
            last = f"import {module}; {module}._get_current_{what}_mode().__exit__(None, None, None);"
            yield _hook(f"torch mode {name_of(type(mode))}", mode, "its __exit__()", last if mode is modes[-1] else "")
    ask_hooks: Any = getattr(sys.modules["torch"]._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if ask_hooks is None else ask_hooks(True)
    if hooks:
        yield LiveRoot(
            kind="library",
            label="saved_tensors_hooks",
            objects=tuple(hooks),
            what="in force: ended by leaving its `with` block",
            ended_by="import torch; torch._C._autograd._pop_saved_tensors_default_hooks();",
        )


def _figures() -> Iterator[LiveRoot]:
    """Yield pyplot's open figures that are only drawn. One with a window or a widget is in use on somebody's screen."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    for number, manager in [] if helpers is None else list(helpers.Gcf.figs.items()):
        if namespace_of(type(manager)).get("__module__") in ("matplotlib.backend_bases", "matplotlib_inline.backend_inline"):
            yield LiveRoot(
                kind="cache", label=f"pyplot figure {number}", objects=(manager,), what="open figure", cache="figure"
            )


def _scripts(shell: Any) -> Iterator[LiveRoot]:
    for path, module in list(getattr(shell, "_main_mod_cache", {}).items()):
        namespace = module_namespace(module)
        if namespace is not None:
            what = "globals of a script that has run"
            yield LiveRoot(kind="cache", label=f"%run {Path(path).name}", objects=(namespace,), what=what, cache="run")


def _stored(shell: Any) -> Iterator[LiveRoot]:
    cache = getattr(getattr(shell, "db", None), "cache", None)
    for path, entry in list(cache.items()) if type(cache) is dict else ():
        if type(entry) is tuple:
            what = "copy of a value on disk"
            yield LiveRoot(kind="cache", label=f"%store {Path(path).name}", objects=entry[:1], what=what, cache="store")


def _ipython(shell: Any) -> Iterator[LiveRoot]:
    for event, callbacks in shell.events.callbacks.items():
        for place, callback in enumerate(callbacks):
            line = f"get_ipython().events.callbacks[{event!r}].pop({place});"
            yield _hook(f"IPython event {event}: {callback_name(callback)}", callback, f"events.unregister('{event}', …)", line)
    for kind, table in shell.magics_manager.magics.items():
        for name, function in list(table.items()):
            yield LiveRoot(
                kind="library",
                label=f"{'%' if kind == 'line' else '%%'}{name}",
                objects=(function,),
                what="magic",
                ended_by=f"get_ipython().magics_manager.magics[{kind!r}].pop({name!r}); "
                f"get_ipython().magics_manager.user_magics.__dict__.pop({name!r}, None);",
            )


def function_of(callback: Any) -> Any:
    """Return the function behind a method; anything else as it is."""
    while type(callback) is types.MethodType:
        callback = callback.__func__
    return callback


def callback_name(callback: Any) -> str:
    """Return the name of a callback's function, or of its class where it is no function."""
    function = function_of(callback)
    is_named = type(function) in (types.FunctionType, types.BuiltinFunctionType)
    return str(function.__name__) if is_named else name_of(type(function))


# --- Objects that the event loop holds: tasks and timers that wait in it, and entries that go at its next turn.
#
# At its next turn go dropped asynchronous generators, and the result that woke the cell. When the last reference to a
# suspended one goes, a hook of asyncio's puts `loop.create_task(generator.aclose())` into the loop's queue (CPython 3.10 to
# 3.14: `BaseEventLoop._asyncgen_finalizer_hook`). Until then the queue keeps what the generator's variables lead to, and
# nothing can be done about it but to let the loop turn. The entry that runs keeps its arguments until it returns: the task
# that a cell has awaited, with its error, until the cell ends.


_OWN = DISPATCH | {"_asyncio", "anyio"}
"""Packages whose tasks and timers run the kernel and the event loop itself."""


def waiting_roots(shell: Any) -> Iterator[LiveRoot]:
    """Yield the tasks and timers of the user's that wait in the event loop of the notebook: it keeps them, whoever has them."""
    asyncio, loop = sys.modules.get("asyncio"), loop_of(shell)
    if asyncio is None or loop is None:
        return
    kernels = asyncio.current_task(loop)  # the one that runs the cell
    for task in sorted((task for task in asyncio.all_tasks(loop) if task is not kernels), key=asyncio.Task.get_name):
        coroutine = asyncio.Task.get_coro(task)
        frame = getattr(coroutine, "cr_frame", None)
        if type(coroutine) is types.CoroutineType and frame is not None and not _is_own(frame.f_globals.get("__name__")):
            name = asyncio.Task.get_name(task)
            line = f"import asyncio; [t.cancel() for t in asyncio.all_tasks() if t.get_name() == {name!r}];"
            yield LiveRoot(
                kind="library",
                label=f"task {name}",
                objects=(task,),
                what=f"{coroutine.__name__}() waits in the event loop",
                ended_by=line,
                registry="task",
            )
    scheduled = getattr(loop, "_scheduled", None)
    for handle in list(scheduled) if type(scheduled) is list else ():
        callback = getattr(handle, "_callback", None)
        if callback is None or _is_own(_module_of(callback)):
            continue
        is_it = f"h.when() == {handle._when!r}"
        yield LiveRoot(
            kind="library",
            label=f"timer {callback_name(called(callback))}",
            objects=(handle,),
            what="waits in the event loop until its time comes",
            ended_by=f"import asyncio; [h.cancel() for h in asyncio.get_running_loop()._scheduled if {is_it}];",
            registry="timer",
        )


def loop_of(shell: Any) -> Any:
    """Return the event loop of this thread, or, asked from another one, the kernel's; None where there is none."""
    events = sys.modules.get("asyncio.events")
    loop = None if events is None else events._get_running_loop()
    return loop or getattr(getattr(getattr(shell, "kernel", None), "io_loop", None), "asyncio_loop", None)


def _is_own(module: object) -> bool:
    return type(module) is str and module.partition(".")[0] in _OWN


def _module_of(callback: Any) -> object:
    function = function_of(called(callback))
    if type(function) in (types.FunctionType, types.BuiltinFunctionType):
        return function.__module__ or namespace_of(type(function.__self__)).get("__module__")
    return namespace_of(type(function)).get("__module__") or type(function).__module__


def ending_handles() -> list[Any]:
    """Return the entries that run or close such generators; none where no event loop of asyncio's own runs in this thread."""
    events = sys.modules.get("asyncio.events")
    loop = None if events is None else events._get_running_loop()
    queue = getattr(loop, "_ready", None)
    if type(queue) is not deque:
        return []
    return [handle for handle in list(queue) if _closes(handle)] + _running()


def ending_roots(handles: Iterable[Any]) -> list[LiveRoot]:
    """Return the root of the objects in these entries, if there are any."""
    objects = tuple(arg for handle in handles for arg in handle._args)
    what = "released when the cell ends"
    return [LiveRoot(kind="library", label="asyncio", objects=objects, what=what, is_ending=True)] if objects else []


def _running() -> list[Any]:
    """Return the entry that the loop of this thread runs now."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("_run_once", "asyncio.base_events"):
        frame = frame.f_back
    handle = None if frame is None else frame_locals(frame).get("handle")
    return [] if type(getattr(handle, "_args", None)) is not tuple else [handle]


def _closes(handle: Any) -> bool:
    callback, args = getattr(handle, "_callback", None), getattr(handle, "_args", None)
    is_task = type(callback) is types.MethodType and callback.__func__.__name__ == "create_task"
    return is_task and type(args) is tuple and len(args) == 1 and name_of(type(args[0])) == "async_generator_athrow"
