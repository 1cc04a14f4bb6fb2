"""The steps of a cleanup, one function for each kind of action. Only references are removed, never contents."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from nbguard.errors import NbguardError
from nbguard.memory.cleanup.apply.interrupts import Interrupts
from nbguard.memory.cleanup.apply.kept_by_torch import (
    FreedBytes,
    clear_workspaces,
    empty_cache,
    forget_failed_backward,
    return_pinned_memory,
)
from nbguard.memory.cleanup.apply.parking import park
from nbguard.memory.cleanup.apply.tracebacks import Placeholders, release_objects, release_variables
from nbguard.memory.cleanup.plan.orphans import diagnose
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.core import advice
from nbguard.memory.core.processes import DeviceProcess, Process, Zombies, pids_text
from nbguard.memory.core.references.graph import CONTEXT, GRADIENT
from nbguard.memory.scan.devices.processes import (
    device_processes,
    is_alive,
    is_listed,
    private_bytes,
    shared_bytes,
    surroundings,
)
from nbguard.memory.scan.heap.compact import HAMT
from nbguard.memory.scan.heap.kinds import TRANSPARENT, Types, attributes_of, mro_of, name_of, namespace_of
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.learners import experiment_of
from nbguard.memory.scan.roots.registries import output_places
from nbguard.memory.scan.roots.tracebacks import ErrorParts, error_parts, kept_debuggers, parts_by_id, traced_frames
from nbguard.memory.scan.scan import Notebook
from nbguard.memory.scan.targets import module_named
from nbguard.memory.scan.workers import worker_pids, worker_processes
from nbguard.texts import form, here

# --- Ends DataLoader workers as torch itself does


_WORKERS_PATIENCE = 3.0
"""Seconds that a process gets to end after each stronger word."""


def end_workers(action: Action, tracker: WeakTracker, freed: FreedBytes) -> None:
    """End the workers that a plan found; the bytes of host memory that came back are added to `freed`.

    The loaders that keep the iterator forget it first, so that their next epoch starts new workers whatever happens here.

    Raises:
        NbguardError: the iterator is in use by now, or a process is still there.
    """
    before = {process: (private_bytes(process.pid) or 0) + (shared_bytes(process.pid) or 0) for process in action.processes}
    _shut_down(action, tracker)
    left = [process for process in action.processes if is_listed(process)]
    if left and (left := _insist(left)):
        raise NbguardError(f"{pids_text([process.pid for process in left])} still there after SIGKILL: {_state(left)}")
    freed.host += sum(before.values())


def _shut_down(action: Action, tracker: WeakTracker) -> None:
    """Let torch shut the iterator down; its remaining batches are lost, and a further `next()` says why."""
    iterator = _object(tracker, action.refs[0]) if action.refs else None
    if iterator is None:  # a step before this one has freed it, or it was gone before
        return
    loaders = [loader for ref in action.refs[1:] if (loader := _object(tracker, ref)) is not None]
    former = [_detach(loader, iterator) for loader in loaders]
    progress = (str(iterator._num_yielded),)
    if progress != action.names or not set(worker_processes(iterator)) <= set(action.processes):
        for loader, kept in zip(loaders, former, strict=True):
            _attach(loader, kept)
        raise NbguardError("it went on since the plan was made, so it is in use")
    if iterator._rcvd_idx < iterator._send_idx:
        iterator._next_data = _ended
    iterator._shutdown_workers()


def _object(tracker: WeakTracker, ref: int) -> Any:
    known = tracker.objects.get(ref)
    return None if known is None else known()


def _detach(loader: Any, iterator: Any) -> Any:
    """Make a loader forget the iterator that it keeps for its next epoch; return it, or None if it keeps another by now."""
    attributes = attributes_of(loader)
    if attributes is None or attributes.get("_iterator") is not iterator:
        return None
    attributes["_iterator"] = None
    return iterator


def _attach(loader: Any, iterator: Any) -> None:
    attributes = attributes_of(loader)
    if iterator is not None and attributes is not None and attributes.get("_iterator") is None:
        attributes["_iterator"] = iterator


def _ended() -> NoReturn:
    raise RuntimeError(
        "the workers of this DataLoader iterator were ended by "
        + form(advice.end_workers().command, here())
        + ": start over with iter(loader)"
    )


def _insist(processes: Iterable[Process]) -> list[Process]:
    """End own children by pid and start, with SIGTERM and then SIGKILL; return those that are still there."""
    left = list(processes)
    for word in ("terminate", "kill"):
        for child in multiprocessing.active_children():
            if any(process.pid == child.pid and is_alive(process) for process in left):
                getattr(child, word)()
        until = time.monotonic() + _WORKERS_PATIENCE
        while left and time.monotonic() < until:
            time.sleep(0.02)
            multiprocessing.active_children()  # asks after those that ended, so that their entries go
            left = [process for process in left if is_listed(process)]
    return left


def _state(processes: Iterable[Process]) -> str:
    alive = [process for process in processes if is_alive(process)]
    return "the system does not end them" if alive else "they ended, and only their entries are left"


# --- List the other processes on the GPUs, and end those that a dead program left behind, by pid and start, and verified.


_PATIENCE = {signal.SIGTERM: 5.0, getattr(signal, "SIGKILL", signal.SIGTERM): 5.0}
"""Seconds that a process gets to end after each signal."""


def find_zombies(pids: Collection[int] = ()) -> Zombies:
    """Return the processes on the machine's GPUs (those with these pids), diagnosed; this one is left out."""
    running, reason = device_processes()
    if not running:
        return Zombies(unavailable=reason)
    around = replace(surroundings(), workers=worker_pids())
    diagnosed = [diagnose(process, around) for process in running if process.process.pid != around.pid]
    diagnosed.sort(key=lambda row: (not row.is_orphan, -(row.found.used or 0), row.found.process.pid))
    return Zombies(diagnosed=tuple(row for row in diagnosed if not pids or row.found.process.pid in pids), unavailable=reason)


def end_orphans(zombies: Zombies) -> Zombies:
    """End the orphans, one after the other, and return the processes, each as ended or with the reason why not.

    An interrupt stops before the next one; the result tells how far it came.
    """
    ended: list[int] = []
    remaining: list[tuple[int, str]] = []
    with Interrupts() as interrupts:
        for orphan in zombies.orphans:
            pid = orphan.process.pid
            if interrupts.happened:
                remaining.append((pid, "interrupted"))
                continue
            try:
                with interrupts.allowed():
                    reason = _end(orphan)
            except KeyboardInterrupt:
                interrupts.happened = True
                reason = "interrupted while it was being ended" if is_alive(orphan.process) else ""
            if reason:
                remaining.append((pid, reason))
            else:
                ended.append(pid)
        return replace(zombies, asked=True, ended=tuple(ended), remaining=tuple(remaining), interrupted=interrupts.happened)


def _end(orphan: DeviceProcess) -> str:
    """End one orphan; return why it is still there, or an empty string."""
    process = orphan.process
    diagnosed = find_zombies((process.pid,)).diagnosed  # once more: it may have changed since the list was made
    if not any(row.found.process == process and row.is_orphan for row in diagnosed):
        return "it is no longer an orphan on a GPU" if is_alive(process) else ""
    for number, patience in _PATIENCE.items():
        if reason := _signal(process, number):
            return reason
        until = time.monotonic() + patience
        while is_alive(process) and time.monotonic() < until:
            time.sleep(0.02)
        if not is_alive(process):
            return ""
    return "it ignores even SIGKILL because it waits in the driver; only the driver or a restart of the machine ends it"


def _signal(process: Process, number: signal.Signals) -> str:
    """Send a signal to this very process and to no other that has its pid by now; return why not, if so."""
    with contextlib.ExitStack() as closing:
        handle = None
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(process.pid)
                closing.callback(os.close, handle)
        if not is_alive(process):  # asked with the handle open: from here on the handle means this process or nobody
            return ""
        try:
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(process.pid, number)
        except ProcessLookupError:
            return ""
        except OSError as error:
            return f"the system refuses: {error.strerror}"
    return ""


# --- Taking one reference away, where no `del` of Python's could be written (an entry, an attribute, a context's value).


_SEQUENCES = Types((list, deque))


def objects_by_id(wanted: set[int]) -> dict[int, Any]:
    """Return the objects that have had these ids since the scan, as far as the collector tracks them.

    In PyTorch 2.4, but not in 2.13, a tensor that only C++ held dies with that holder although Python refers to it.
    `_fix_weakref` makes Python's reference count.
    """
    found = {id(obj): obj for obj in gc.get_objects() if id(obj) in wanted}
    for obj in found.values():
        if _is_tensor(mro_of(type(obj))):
            sys.modules["torch"].Tensor._fix_weakref(obj)
    return found


def take_away(owner: Any, value: Any, step: str) -> bool:
    """Take every reference from `owner` to `value` away that is written `step`; return whether there was one.

    An entry of a container goes. An attribute becomes None: whoever reads it later finds that there is nothing, and no error.
    """
    bases = mro_of(type(owner))
    if step.startswith(CONTEXT):
        return _out_of_contexts(owner, value)
    if dict in bases:
        return _out_of_dict(owner, value, step)
    if type(owner) in _SEQUENCES:
        places = [place for place, item in enumerate(owner) if item is value]
        for place in reversed(places):
            del owner[place]
        return bool(places)
    if set in bases:
        set.discard(owner, value)
        return True
    if step == GRADIENT and _is_tensor(bases):
        owner.grad = None
        return True
    if type in bases:
        return _out_of_class(owner, value)
    return _out_of_slots(owner, value) or any(_out_of_dict(space, value, step) for space in _spaces(owner))


def _is_tensor(bases: Types) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.__dict__["Tensor"] in bases


def _spaces(owner: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts of an object's attributes; the parts of a torch module come by their names, too."""
    attributes = attributes_of(owner)
    if attributes is not None:
        yield attributes
        yield from (attributes[name] for name in TRANSPARENT if dict in mro_of(type(attributes.get(name))))


def _out_of_dict(owner: Any, value: Any, step: str) -> bool:
    keys = [key for key, held in list(dict.items(owner)) if held is value or key is value]
    if keys and step.startswith(".") and (cls := _class_of(owner)) is not None:
        return _out_of_class(cls, value)
    if step.startswith(".") or _is_shared_by_instances(owner):
        for key in keys:
            owner[key] = None
    else:
        for key in keys:
            del owner[key]
    return bool(keys)


def _class_of(space: dict[Any, Any]) -> Any:
    """Return the class whose attributes a dict is; None for any other dict. A class notices a change only if it is asked to."""
    classes = (obj for obj in gc.get_referrers(space) if type in mro_of(type(obj)))
    return next((cls for cls in classes if any(ref is space for ref in gc.get_referents(namespace_of(cls)))), None)


def _is_shared_by_instances(space: dict[Any, Any]) -> bool:
    """Say whether a dict has the attributes of all instances of a class (`self.__dict__ = self._shared_state`)."""
    spaces = {id(obj): obj for obj in gc.get_referrers(space) if type(obj) is dict}
    classes = [cls for inner in spaces.values() if (cls := _class_of(inner)) is not None]
    inits = (namespace_of(cls).get("__init__") for cls in classes)
    return any("__dict__" in init.__code__.co_names for init in inits if type(init) is types.FunctionType)


def _out_of_class(cls: Any, value: Any) -> bool:
    names = [name for name, held in list(namespace_of(cls).items()) if held is value]
    for name in names:
        type.__setattr__(cls, name, None)
    return bool(names)


def _out_of_slots(owner: Any, value: Any) -> bool:
    found = False
    for base in mro_of(type(owner)):
        for slot in list(namespace_of(base).values()):
            if "__slots__" in namespace_of(base) and hasattr(type(slot), "__set__") and _has(slot, owner, value):
                slot.__set__(owner, None)
                found = True
    return found


def _has(slot: Any, owner: Any, value: Any) -> bool:
    try:
        return type(slot).__name__ == "member_descriptor" and slot.__get__(owner) is value
    except AttributeError:  # a slot without a value
        return False


def break_cycles_of(obj: Any) -> None:
    """Empty a tensor that nothing but a cycle leads to, as the collector would if it saw that: gradient, hooks, attributes."""
    if not _is_tensor(mro_of(type(obj))):
        return
    if obj.is_leaf:
        obj.grad = None
    for hooks in (obj._backward_hooks, obj._post_accumulate_grad_hooks):
        if hooks:
            hooks.clear()
    (attributes_of(obj) or {}).clear()


def _out_of_contexts(node: Any, value: Any) -> bool:
    """Give variables that have this value None, in each context with `node` in its mapping; return whether any had it.

    Raises:
        RuntimeError: a context is in force, in a thread that runs.
    """
    contexts = [obj for obj in gc.get_objects() if type(obj) is contextvars.Context and _is_part_of(node, obj)]
    found = False
    for context in contexts:
        for variable in [variable for variable, held in context.items() if held is value]:
            context.run(variable.set, None)
            found = True
    return found


def _is_part_of(node: Any, context: contextvars.Context) -> bool:
    """Say whether the mapping of a context contains a node. Copies of a context share nodes."""
    todo: list[Any] = [context]
    while todo:
        for part in gc.get_referents(todo.pop()):
            if part is node:
                return True
            if name_of(type(part)).startswith(HAMT):
                todo.append(part)
    return False


_PASSES = 5
"""Passes of the collector: cycles behind objects that it cannot see through (arrays of objects, DataFrames) take one more."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Everything that one step of a cleanup needs."""

    action: Action  # the step of the plan
    notebook: Notebook  # whose names and outputs it may delete
    tracker: WeakTracker  # weak references to the storages of the scan before the plan
    promised: frozenset[int]  # numbers of the storages that the whole plan frees
    interrupts: Interrupts  # of the whole cleanup
    freed: FreedBytes  # to which a step adds memory that the tracker cannot count


def _delete(step: StepContext) -> None:
    (text,) = step.action.names
    code = compile(f"del {text}", "<%reset_gpu>", "exec")
    modules = {name: module for name in code.co_names[:1] if (module := module_named(name)) is not None}
    exec(code, modules, step.notebook.namespace)  # noqa: S102 - `del` as the user would; names come before modules


def _take_away(step: StepContext) -> None:
    """Take away the reference that the action names by the ids of its owner and its object."""
    *owners, value = step.action.refs
    found = objects_by_id({*owners, value})
    known = [owner for owner in owners if {owner, value} <= found.keys()]
    taken = sum(take_away(found[owner], found[value], step.action.names[1]) for owner in known)
    if not taken:
        raise LookupError("it changed since the scan; run it again")


def _run_line(step: StepContext) -> None:
    """Run the line that ends a registration; a context variable's also where ipykernel keeps the values between two cells."""
    code = compile(step.action.names[1], "<%reset_gpu>", "exec")
    exec(code, step.notebook.namespace)  # noqa: S102 - as it is advised
    context = getattr(getattr(step.notebook.shell, "kernel", None), "_shell_context", None)
    if type(context) is contextvars.Context and step.action.names[1].endswith(".set(None);"):
        context.run(exec, code, step.notebook.namespace)


def _forget_output(step: StepContext) -> None:
    """Take a displayed object out of every place where IPython keeps it; other results stay where they are."""
    refs = set(step.action.refs)
    for number in [number for number, value in step.notebook.out.items() if id(value) in refs]:
        aliases = [
            (space, name)
            for space, name in output_places(step.notebook.shell)
            if name == f"_{number}" and id(space[name]) in refs
        ]
        del step.notebook.out[number]
        for space, name in aliases:
            del space[name]
    empty = {"result": None}
    for space, name in [(space, name) for space, name in output_places(step.notebook.shell) if id(space[name]) in refs]:
        space[name] = empty.get(name, "")


def _release_error(step: StepContext) -> None:
    _release_parts(step, error_parts(step.notebook.shell))


def _release_kept_error(step: StepContext) -> None:
    _release_parts(step, parts_by_id(set(step.action.refs[::2])))


def _release_parts(step: StepContext, error: ErrorParts) -> None:
    """Put placeholders in place of the objects that the action names, (owner, object) pairs by id, in frames and exceptions."""
    pairs = set(zip(step.action.refs[::2], step.action.refs[1::2], strict=True))
    placeholders = Placeholders()
    release_variables(error.frames, pairs, placeholders)
    release_objects(error.errors, pairs, placeholders)


def _drop_compiled(_: StepContext) -> None:
    sys.modules["torch._dynamo"].reset()


def _empty_function_cache(step: StepContext) -> None:
    """Empty the caches of the functions that the action names by id: nothing has made or freed one since the plan."""
    wrapper = functools._lru_cache_wrapper
    for function in [obj for obj in gc.get_objects() if type(obj) is wrapper and id(obj) in step.action.refs]:
        wrapper.cache_clear(function)


def _forget_copy(step: StepContext) -> None:
    """Take objects out of the cache that the action names: copies that their owner can do without."""
    shell, cache, refs = step.notebook.shell, step.action.cache, set(step.action.refs)
    if cache == "garbage":
        gc.garbage.clear()
    elif cache == "cycle":
        for tensor in objects_by_id(refs).values():
            break_cycles_of(tensor)
    elif cache == "run":
        _drop(shell._main_mod_cache, {path for path, module in shell._main_mod_cache.items() if id(module.__dict__) in refs})
    elif cache == "store":
        _drop(shell.db.cache, {path for path, entry in shell.db.cache.items() if id(entry[0]) in refs})
    else:
        figures = sys.modules["matplotlib._pylab_helpers"].Gcf
        for number in [number for number, manager in figures.figs.items() if id(manager) in refs]:
            figures.destroy(number)


def _drop(cache: dict[Any, Any], keys: set[Any]) -> None:
    for key in keys:
        del cache[key]


def _forget_debugger(_: StepContext) -> None:
    for frame in traced_frames():
        frame.f_trace = None
    if kept_debuggers():
        sys.modules["pdb"].Pdb._last_pdb_instance = None  # its breakpoints are the class's


def _clear_leftovers(step: StepContext) -> None:
    for ref in step.action.refs:
        known = step.tracker.objects.get(ref)
        learner = None if known is None else known()
        if learner is not None:
            leftovers = experiment_of(type(learner)).leftovers
            for name in step.action.names:
                if name in leftovers:
                    learner.__dict__[name] = leftovers[name]
                else:  # an attribute of one of its callbacks
                    callback, _, attribute = name.partition(".")
                    learner.__dict__[callback].__dict__.pop(attribute, None)


def park_storages(step: StepContext) -> str:
    """Park, and return why some of it was left, or an empty string. Stops by itself, between storages, when interrupted."""
    failure = park(step.action.names[0], step.action.refs, step.tracker, lambda: step.interrupts.happened)
    empty_cache()
    return failure


def _has_idle_devices() -> bool:
    """Say whether there are GPUs that are not in use yet.

    A first backward pass would start PyTorch's threads for them, and a process that is forked later has none of these.
    """
    cuda = sys.modules["torch"].cuda
    return not cuda.is_initialized() and cuda.device_count() > 0


def _collect(step: StepContext) -> None:
    """Run the collector; objects that it shall leave alone, by the ids of the step, are held until its end.

    Before that, a failed backward pass is forgotten: the error that says so may be gone.
    """
    held = objects_by_id({*step.action.refs}) if step.action.refs else {}
    if not _has_idle_devices():
        forget_failed_backward()
    debug = gc.get_debug()
    gc.set_debug(debug & ~gc.DEBUG_SAVEALL)  # else collected objects would be kept in gc.garbage
    try:
        for _ in range(_PASSES):
            gc.collect()
            if step.promised <= step.tracker.expired():
                break
    finally:
        gc.set_debug(debug)
    held.clear()
    empty_cache()


STEPS: dict[str, Callable[[StepContext], None]] = {
    "del": _delete,
    "cut": _take_away,
    "line": _run_line,
    "out": _forget_output,
    "error": _release_error,
    "debugger": _forget_debugger,
    "leftovers": _clear_leftovers,
    "cache": _forget_copy,
    "collect": _collect,
    "kept_error": _release_kept_error,
    "compiled": _drop_compiled,
    "function_cache": _empty_function_cache,
    "workers": lambda step: end_workers(step.action, step.tracker, step.freed),
    "pinned": lambda step: return_pinned_memory(step.freed),
    "workspaces": lambda step: clear_workspaces(step.freed),
}
