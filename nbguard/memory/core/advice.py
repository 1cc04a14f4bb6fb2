"""Advice: one line to run, its effect, and the bytes that it gives back. Every command that nbguard prints is made here.

It has both its forms: the magic, and the call of Python that does the same where there are no magics.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from nbguard.texts import Text
from nbguard.units import MiB

_RESET = "%reset_gpu"
_REPORT = "%gpumem"
_SWITCH = "%nbguard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One line to run in a cell. Without a command there is none that lets the memory go, and `effect` may say why."""

    command: str  # runs as it stands; empty without one
    call: str = field(default="", compare=False, metadata={"json": False})
    """The same in Python without magics; empty if the command is Python already, or only the magic does it.

    `command` has it, too, and so has every sentence that it is added to.
    """

    terminal: str = field(default="", compare=False, metadata={"json": False})  # nbguard's own command, where it has one
    effect: str = ""  # in a few words
    frees: int | None = None  # bytes of tensors that it gives back as things stand; None if it frees none, or it is not known
    targets: tuple[str, ...] = field(default=(), metadata={"json": False})  # names that a cleanup is told to delete
    cut: frozenset[tuple[int, int]] = field(default=frozenset(), compare=False, metadata={"json": False})
    """References that it takes away: (parent, child) nodes of the graph it was made for; empty where they are not known."""

    is_own: bool = field(default=False, compare=False, metadata={"json": False})  # a method of the thing's that empties it
    ends: str = field(default="", compare=False, metadata={"json": False})  # label of the root that it takes away

    def __post_init__(self) -> None:
        if self.call:
            object.__setattr__(self, "command", Text(str(self.command), self.call, self.terminal or None))

    @property
    def code(self) -> str:
        """Return the command as code in a sentence, to be added to it; empty where there is none."""
        return "`" + self.command + "`" if self.command else ""

    @property
    def in_python(self) -> Advice:
        """Return the same with the call as its only form, for a script that reads it."""
        return replace(self, command=self.call or str(self.command), call="", terminal="")

    @property
    def is_code(self) -> bool:
        """Return whether the command runs as it stands: a magic, or a line of Python."""
        return self.command.startswith("%") or (bool(self.command) and is_python(self.command))


def is_python(text: str) -> bool:
    """Return whether a text is at least one statement of Python."""
    try:
        return bool(ast.parse(text).body)
    except SyntaxError:
        return False


def _call(function: str, names: Sequence[str] = (), *arguments: str) -> str:
    """Return a call of the API; names are strings in it, the other arguments stand as they are."""
    texts = (repr(name) if '"' in name else f'"{name}"' for name in names)
    return f"nbguard.{function}({', '.join((*texts, *arguments))})"


NONE = Advice(command="")
ONLY_WITH_KERNEL = Advice(
    command="", effect="freed only with the kernel; C++ or one of Python's tables keeps it, and no line removes it"
)
UNSEEN_TENSORS = Advice(
    command="", effect="freed by the next backward pass if an earlier one failed and left it behind, else only with the kernel"
)
ONLY_WITH_CLASS = Advice(command="", effect="freed with the class, which was made while the code ran, and with its objects")
ONLY_ITS_ATTRIBUTES = Advice(command="", effect="logging keeps each logger until the kernel ends, and lets its attributes go")
ONLY_WITH_THREAD = Advice(command="", effect="freed when the thread ends")

# --- what gives memory back -------------------------------------------------------------------------------------------------


def release_stale(frees: int | None = None) -> Advice:
    """Return the advice that frees all that is stale."""
    return Advice(command=_RESET, call=_call("release"), effect="frees all stale memory", frees=frees)


def release_stale_of_engines(frees: int | None = None) -> Advice:
    """Return the advice that frees all that is stale in the engines of an ipyparallel cluster."""
    return Advice(command=f"{_RESET} --engines", effect="frees all stale memory in each engine", frees=frees)


def release_names(names: Sequence[str], frees: int | None = None, *, has_caches: bool = False) -> Advice:
    """Return the advice that deletes names, or the expressions that one writes after `del`, and frees their memory.

    With `has_caches` it empties the caches of functions that have it, too.
    """
    emptied = ", empties the caches that have them" if has_caches else ""
    return Advice(
        command=f"{_RESET} {' '.join(names)}{' --caches' if has_caches else ''}",
        call=_call("release", names, *["caches=True"] * has_caches),
        effect=f"deletes {', '.join(names)}{emptied} and frees their memory",
        frees=frees,
        targets=tuple(names),
    )


def delete_name(name: str) -> Advice:
    """Return the line that deletes a name whose object has a class of its own: the collector takes both, a cleanup neither."""
    return Advice(command=f"del {name}; import gc; gc.collect();", effect="deletes it, and the class that was made for it")


def let_go(paths: Sequence[str], frees: int | None = None) -> Advice:
    """Return the advice that takes the last reference on each path away: an entry goes, an attribute becomes None."""
    effect = f"takes {', '.join(paths)} away and frees its memory"
    call = _call("release", paths)
    return Advice(command=f"{_RESET} {' '.join(paths)}", call=call, effect=effect, frees=frees, targets=tuple(paths))


def unregister(label: str) -> Advice:
    """Return the advice that takes a function off the list of those which run when the process ends, by its label."""
    effect = "unregisters it as `atexit.unregister` does: it no longer runs"
    return Advice(command=f"{_RESET} {label}", call=_call("release", [label]), effect=effect, targets=(label,), ends=label)


def detach_finalizer(path: str) -> Advice:
    """Return the advice that ends a `weakref.finalize` which keeps memory alive, by its path in the registry."""
    effect = "detaches the finalizer as its `detach()` does: it no longer runs"
    return Advice(command=f"{_RESET} {path}", call=_call("release", [path]), effect=effect, targets=(path,))


def release_output(label: str, frees: int | None = None) -> Advice:
    """Return the advice that forgets a displayed result, `Out[3]`."""
    effect = "forgets the displayed result and frees its memory"
    call = _call("release", [label])
    return Advice(command=f"{_RESET} {label}", call=call, effect=effect, frees=frees, targets=(label,))


def release_errors(frees: int | None = None) -> Advice:
    """Return the advice that releases the objects in the frames of kept exceptions."""
    effect = "releases memory held by the frames of exceptions, and keeps the exceptions"
    return Advice(command=f"{_RESET} --errors", call=_call("release", (), "errors=True"), effect=effect, frees=frees)


def empty_caches(frees: int | None = None) -> Advice:
    """Return the advice that empties the caches of functions which alone keep memory alive."""
    effect = "empties the caches of functions that alone keep memory; it cannot be undone"
    return Advice(command=f"{_RESET} --caches", call=_call("release", (), "caches=True"), effect=effect, frees=frees)


def release_pool(library: str, line: str) -> Advice:
    """Return the line that has a library give unused memory of its pool back to the driver."""
    return Advice(command=line, effect=f"gives unused memory of {library}'s pool back")


def end_workers() -> Advice:
    """Return the advice that ends idle workers of DataLoaders: host memory comes back."""
    call = _call("release", (), "workers=True")
    return Advice(command=f"{_RESET} --workers", call=call, effect="ends idle workers of DataLoaders")


def end_joblib_workers() -> Advice:
    """Return the line that ends the workers which joblib keeps for the next call."""
    line = "from joblib.externals.loky import get_reusable_executor; get_reusable_executor().shutdown()"
    return Advice(command=line, effect="ends joblib's workers")


def park(names: Sequence[str], frees: int | None = None) -> Advice:
    """Return the advice that moves the tensors of names into host memory."""
    command, call = f"{_RESET} --park {' '.join(names)}", _call("park", names)
    return Advice(command=command, call=call, effect=f"moves {', '.join(names)} to host memory", frees=frees)


def unpark(names: Sequence[str]) -> Advice:
    """Return the advice that brings parked memory back."""
    are = "it" if len(names) == 1 else "them"
    return Advice(command=f"{_RESET} --unpark {' '.join(names)}", call=_call("unpark", names), effect=f"brings {are} back")


def make_room(nbytes: int) -> Advice:
    """Return the advice that moves tensors out and back so that a request of that size fits in one piece."""
    size = size_text(nbytes)
    effect = "moves tensors to host memory and back, so that free memory lies in one piece"
    return Advice(command=f"{_REPORT} make-room {size}", call=_call("make_room", [size]), effect=effect)


def size_text(nbytes: int) -> str:
    """Return a size as a command takes it, to the byte: `256MiB`, `268435457B`."""
    for name, unit in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return f"{nbytes}B"


def zero_gradients(label: str, frees: int | None = None, call: str = "model.zero_grad()") -> Advice:
    """Return the advice that frees the gradients of a Learner by a call of its own; its next fit makes new ones."""
    effect = "frees the gradients, the next fit makes new ones"
    return Advice(command=f"{label}.{call}", effect=effect, frees=frees)


def copy_of_view(name: str, *, has_graph: bool, frees: int | None = None) -> Advice:
    """Return the advice that puts a copy in the place of a small view that keeps a large tensor alive."""
    copied = f"{name}.detach().clone()" if has_graph else f"{name}.clone()"
    return Advice(command=f"{name} = {copied}", effect="keeps a copy of the part alone", frees=frees)


def detach(name: str, container: str, cut: frozenset[tuple[int, int]]) -> Advice:
    """Return the line that takes a tensor, or each one in a "list" or "dict", off its autograd graph."""
    command = {
        "": f"{name} = {name}.detach()",
        "list": f"{name}[:] = [each.detach() for each in {name}]",
        "dict": f"{name}.update({{key: each.detach() for key, each in {name}.items()}})",
    }[container]
    return Advice(command=command, effect="keeps the values without their graphs", cut=cut)


def detach_together(lines: Sequence[Advice]) -> Advice:
    """Return one line that does all of these, for names whose common graph none of them frees alone."""
    command = "; ".join(line.command.removesuffix(";") for line in lines)
    return Advice(command=command, effect=lines[0].effect, cut=frozenset(edge for line in lines for edge in line.cut))


def detach_in_place(code: str, cut: frozenset[tuple[int, int]]) -> Advice:
    """Return the line that takes tensors off their graphs where they are; IPython neither shows nor keeps its result."""
    return Advice(command=f"{code};", effect="keeps the values without their graphs", cut=cut)


def without_graph(container: str, kind: str) -> Advice:
    """Return the line that puts a loss into a container without its autograd graph.

    `kind`: the name of the container's class; "tensor" for a sum, "joined" for a tensor that others are joined to. There is
    no line for other classes: how something gets into them is not known.
    """
    lines = {
        ("list", "deque"): f"{container}.append(loss.item())",
        ("set",): f"{container}.add(loss.item())",
        ("tuple",): f"{container} += (loss.item(),)",
        ("dict", "defaultdict", "OrderedDict"): f"{container}[key] = loss.item()",
        ("tensor",): f"{container} += loss.item()",
        ("joined",): f"{container} = torch.cat(({container}, value.detach()))",
    }
    command = next((line for kinds, line in lines.items() if kind in kinds), "")
    return Advice(command=command, effect="keeps the value without its graph") if command else NONE


EMPTIES_CACHE = "empties the function's cache"


def empty_cache_of(module: str, function: str, frees: int | None = None) -> Advice:
    """Return the line that empties the cache of one function; `module` is imported for it, if it is not empty."""
    return Advice(command=f"{_imported(module)}{function}.cache_clear()", effect=EMPTIES_CACHE, frees=frees)


def empty_container(module: str, container: str, frees: int | None = None) -> Advice:
    """Return the line that empties a container of a library or a class."""
    return Advice(command=f"{_imported(module)}{container}.clear()", effect=f"empties {container}", frees=frees)


def delete_attribute(module: str, path: str) -> Advice:
    """Return the line that deletes an attribute of an object of a library."""
    return Advice(command=f"{_imported(module)}del {path}", effect=f"deletes {path}")


def call_own_end(module: str, owner: str, method: str, argument: str = "") -> Advice:
    """Return the line that calls an object's own method, which clears its collected values; the object stays."""
    effect = f"lets go of {argument}" if argument else "clears its collected values"
    return Advice(command=f"{_imported(module)}{owner}.{method}({argument})", effect=effect, is_own=True)


def empty_parts(module: str, places: Sequence[tuple[str, bool]], cut: frozenset[tuple[int, int]]) -> Advice:
    """Return the line that lets go of (path, whether it is a container) on a model; the model stays as it is.

    An attribute becomes None and a container is emptied: code that asks for it finds that there is nothing.
    """
    attributes = "".join(f"{path} = " for path, is_container in places if not is_container)
    lines = [f"{attributes}None"] * bool(attributes) + [f"{path}.clear()" for path, is_container in places if is_container]
    return Advice(command=_imported(module) + "; ".join(lines), effect="lets go of it, and leaves the model", cut=cut)


def in_sequence(lines: Sequence[Advice]) -> Advice:
    """Return lines of Python as one that runs them in this order, or no advice if there are none."""
    if len(lines) < 2:
        return lines[0] if lines else NONE
    cut = frozenset[tuple[int, int]]().union(*(line.cut for line in lines))
    return Advice(command="; ".join(line.command for line in lines), effect=lines[0].effect, cut=cut)


def cancel_work(executor: str, type_name: str) -> Advice:
    """Return the line that lets go of the work that waits in an executor, by the name of its class; it takes no more.

    An executor of threads lets go at once. One of processes keeps the running calls until they are done, and the line returns
    then; the executor itself keeps a list of the cancelled calls. joblib's would do all that waits first, so its workers are
    ended.
    """
    lines = {
        "ThreadPoolExecutor": f"{executor}.shutdown(wait=False, cancel_futures=True)",
        "_ReusablePoolExecutor": f"{executor}.shutdown(kill_workers=True)",
    }
    of_processes = f"{executor}.shutdown(cancel_futures=True); del {executor}"
    return Advice(command=lines.get(type_name, of_processes), effect="drops the work that waits")


def cancel(line: str, name: str, *, is_task: bool) -> Advice:
    """Return the line that cancels a waiting task of an event loop by its name, or `line` if it has none."""
    by_name = f"{name}.cancel(); del {name}" if is_task else f"{name}.cancel()"
    return Advice(command=by_name if name else line, effect="cancels it; its memory is freed when the cell ends")


def end_threads(executor: str) -> Advice:
    """Return the line that ends the idle threads of an executor; it takes no more work."""
    return Advice(command=f"{executor}.shutdown()", effect="ends its threads, which take no more work")


def end_registration(line: str) -> Advice:
    """Return the advice that ends a library's hold on something, by the line that its registry has."""
    return Advice(command=line, effect="ends the library's hold on it")


def _imported(module: str) -> str:
    """Return the import without which a label is no expression in a notebook."""
    return f"import {module}; " if module else ""


WAIT = Advice(command="wait until it ends")
EXPANDABLE = Advice(command="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", effect="in the environment before CUDA starts")

# --- what changes a setting, and what shows more ----------------------------------------------------------------------------


def airbag(size: str = "4GiB") -> Advice:
    """Return the advice that sets host memory aside for allocations that do not fit a device."""
    effect = "lets a cell that does not fit go on in host memory, slower, with the same results"
    return Advice(command=f"{_REPORT} airbag {size}", call=_call("airbag", [size]), effect=effect)


def survive_in_learner(name: str) -> Advice:
    """Return the line that lets the fits of a Learner go on where they run out of memory; without a name, its argument."""
    effect = "lets the fit go on where a batch runs out of memory: in pieces, with the same weights"
    line = f"import nbguard; {name}.add_cb(nbguard.SurviveOOM())" if name else "cbs=nbguard.SurviveOOM()"
    return Advice(command=line, effect=effect if name else f"in the call of the fit {effect}")


def survive_around(names: Sequence[str]) -> Advice:
    """Return the first line of a block that lets the training in it go on where it runs out of memory."""
    effect = "around the training lets it go on where a batch runs out of memory: in pieces, with the same weights"
    return Advice(command=f"with {_call('survive', (), *names)}:", effect=effect)


def budget(size: str = "14GiB") -> Advice:
    """Return the advice that lets models take turns within a budget."""
    effect = "lets models that do not fit together take turns: one that is called comes back, and others are parked for it"
    return Advice(command=f"{_REPORT} budget {size}", call=_call("budget", [size]), effect=effect)


def allow_whole_device(device: str) -> Advice:
    """Return the line that lifts the memory fraction of a device."""
    line = f"import torch; torch.cuda.set_per_process_memory_fraction(1.0, '{device}')"
    return Advice(command=line, effect="lifts the limit")


def end_autocast(device: str) -> Advice:
    """Return the line that ends an autocast which a failed fit left on."""
    return Advice(command=f"import torch; torch.set_autocast_enabled('{device}', False)", effect="ends it")


def why(name: str) -> Advice:
    """Return the advice that shows the references that keep something alive."""
    return Advice(command=f"{_REPORT} why {name}", call=_call("why", [name]), effect="shows the reference paths")


def predict_savings(name: str) -> Advice:
    """Return the advice that tries the changes which save memory in the next fit of a Learner."""
    effect = "tries mixed precision, gradient accumulation, checkpoints and frozen layers, each with its bytes and lines"
    return Advice(command=f"{_REPORT} predict {name} --savings", call=f"nbguard.predict({name}, savings=True)", effect=effect)


ON_A_GPU = Advice(
    command=f"{_REPORT} predict learn --gpu 16GiB",
    call="nbguard.predict(learn, gpu='16GiB')",
    terminal="nbguard predict train.py --gpu 16GiB",
    effect="says whether it fits there",
)
UNFREEZE = Advice(command="import gc; gc.unfreeze()", effect="shows the objects that gc.freeze() hides")
PLAN = Advice(command=f"{_RESET} --dry-run", call=_call("plan"), effect="shows the plan and touches nothing")
PLACEHOLDER = Advice(command=f"{_RESET} NAME", call=_call("release", ["NAME"]), effect="frees the memory of a name")
EVERYTHING = Advice(
    command=f"{_RESET} --all",
    call=_call("release", (), "everything=True"),
    effect="frees every name that leads to device memory",
)
HARD = Advice(
    command=f"{_RESET} --hard", call=_call("release", (), "hard=True"), effect="also clears caches that libraries recreate"
)
UNPARK_ALL = Advice(command=f"{_RESET} --unpark", call=_call("unpark"), effect="brings back everything parked")
PARK_PLACEHOLDER = Advice(
    command=f"{_RESET} --park NAME", call=_call("park", ["NAME"]), effect="moves the tensors of a name into host memory"
)
ZOMBIES = Advice(command=f"{_RESET} --zombies", call=_call("zombies"), effect="lists the processes on the GPUs")
END_ZOMBIES = Advice(
    command=f"{_RESET} --zombies --yes", call=_call("end_zombies"), effect="ends processes that dead programs left on the GPUs"
)
REPORT = Advice(command=_REPORT, call=_call("report"), effect="shows who holds the memory")
ALL_HOLDERS = Advice(command=f"{_REPORT} --all", effect="shows small holders, too")
WHY = Advice(command=f"{_REPORT} why", call=_call("why", ["NAME"]), effect="with a name, shows the reference paths")
MAP = Advice(command=f"{_REPORT} map", call=_call("memory_map"), effect="shows where in the segments it lies")
BUDGET_OFF = Advice(command=f"{_REPORT} budget off", call=_call("budget", ["off"]), effect="parks no more models")
AIRBAG_OFF = Advice(command=f"{_REPORT} airbag off", call=_call("airbag", ["off"]), effect="gives the host memory back")
OOM = Advice(command=f"{_REPORT} oom", call=_call("oom"), effect="says more about the last failed request")
HISTORY = Advice(command=f"{_REPORT} history", effect="shows each cell's change of the memory")
CELLS_ON = Advice(command=f"{_REPORT} cells on", effect="says so in a line after each cell")
RECORD_ON = Advice(command=f"{_REPORT} record on", call=_call("record"), effect="keeps PyTorch's history of its allocator")
RECORD_OFF = Advice(command=f"{_REPORT} record off", call="nbguard.record(False)", effect="ends and forgets the history")
WHATIF = Advice(command=f"{_REPORT} whatif", call=_call("whatif_report"), effect="replays the history under other settings")
MOMENTS = Advice(command=f"{_REPORT} map --history", call=_call("live_moment"), effect="shows its moments, from the peak on")
SNAPSHOT = Advice(
    command=f"{_REPORT} snapshot", call=_call("save_snapshot", ["FILE"]), effect="with a file's name, writes a snapshot"
)
SNAPSHOT_FILE = Advice(
    command=f"{_REPORT} snapshot FILE", call=_call("save_snapshot", ["FILE"]), effect="writes a snapshot to a file"
)
PREDICT_CELL = Advice(
    command="%%profile_fit --predict", effect="above a cell predicts each of its fits, of `learn.fine_tune` both stages"
)
PROFILE_FIT = Advice(command="%%profile_fit", call="nbguard.profile_fit()", effect="measures the batches of a fit")
LAST_FIT = Advice(command="%profile_fit --last", call=_call("last_fit"), effect="shows all figures of the last profile")
STOP_ON_NAN = Advice(
    command="%%profile_fit --stop-on-nan", call="nbguard.profile_fit(stop_on_nan=True)", effect="stops a fit at its first NaN"
)
SAVE_FIT = Advice(
    command="%%profile_fit --save FILE", call='nbguard.profile_fit(save="FILE")', effect="writes a fit's profile to a file"
)
SIMULATE_ALL = Advice(
    command=f"{_REPORT} simulate --all", call="sim.figures().assumptions", effect="shows the assumptions of the simulation"
)
SIMULATE_OFF = Advice(command=f"{_REPORT} simulate off", effect="ends the simulation")
ON = Advice(command=f"{_SWITCH} on", effect="switches everything on")
AUTO_CLEAN = Advice(command=f"{_SWITCH} on --auto-clean-errors", effect="cleans up after a failed cell at once")
LOG_OFF = Advice(command=f"{_SWITCH} log off", effect="ends the log of the memory")
NOTICES_ON = Advice(command=f"{_SWITCH} notices on", effect="shows all notices")
ASSISTANTS = Advice(command=f"{_SWITCH} mcp", effect="shows the plans that assistants ask for")
ASSISTANTS_ON = Advice(command=f"{_SWITCH} mcp on", effect="lets assistants look at this kernel")
ASSISTANTS_OFF = Advice(command=f"{_SWITCH} mcp off", effect="ends the access of assistants")


def allow_plan(token: str) -> Advice:
    """Return the advice that carries out a plan which an assistant asks for."""
    return Advice(command=f"{_SWITCH} mcp allow {token}", effect="carries it out")


# --- what makes a run repeat, and a model export ----------------------------------------------------------------------------


def diagnose(name: str = "learn", batch: str = "") -> Advice:
    """Return the advice that tries a Learner or a model; `batch` names one for a model that has no loader."""
    return Advice(
        command=f"{_SWITCH} doctor {name}{f' --batch {batch}' if batch else ''}",
        call=_call("diagnose", (), *filter(None, (name, batch))),
        terminal="nbguard doctor train:learn",
        effect="checks whether it repeats and exports",
    )


CHECK_LAUNCH = Advice(
    command=f"{_SWITCH} doctor --ranks",
    call=_call("diagnose_launch"),
    terminal="nbguard doctor --ranks",
    effect="checks whether ranks can be launched here",
)
CHECK_RANKS = Advice(
    command="%%profile_fit --check-ranks 100",
    call=_call("profile_fit", (), "check_ranks=100"),
    effect="compares the ranks' models bit by bit at each 100th step",
)
SELF_TEST = Advice(
    command=f"{_SWITCH} doctor --ranks --self-test",
    call=_call("diagnose_launch", (), "self_test=True"),
    terminal="nbguard doctor --ranks --self-test",
    effect="runs an all-reduce in two processes",
)
NAME_ONE = Text(diagnose().code, f"`{diagnose().call}`", f"name one, as in  {diagnose().terminal}")
"""The end of a sentence that says that nothing was given to try."""


def make_deterministic(name: str = "", *, warn_only: bool = False) -> Advice:
    """Return the advice that seeds everything and switches to deterministic algorithms."""
    words = [_SWITCH, "fix determinism", name, "--warn-only" if warn_only else ""]
    given = [*[f"learn={name}"] * bool(name), *["warn_only=True"] * warn_only]
    return Advice(
        command=" ".join(word for word in words if word),
        call=f"repeat = {_call('deterministic', (), *given)}",
        effect="makes the following code repeatable",
    )


def undo_deterministic() -> Advice:
    """Return the advice that puts back all that `make_deterministic` sets."""
    return Advice(command=f"{_SWITCH} fix determinism --undo", call="repeat.undo()", effect="puts all of it back")


def repair_export(name: str, batch: str = "") -> Advice:
    """Return the advice that makes a copy of a model that exports; `batch` names one for a model that has no loader."""
    call = f"exportable = {_call('exportable', (), *filter(None, (name, batch)))}"
    given = f" --batch {batch}" if batch else ""
    return Advice(command=f"{_SWITCH} fix export {name}{given}", call=call, effect="makes a copy that exports")


RECORD_RUN = Advice(command=f"{_SWITCH} record learn", call="nbguard.run_record(learn)", effect="records the run")
RECORD_RUN_AS = Advice(command=f"{_SWITCH} record learn -o run", call=f"run = {RECORD_RUN.call}", effect="keeps its record")
SAVE_RECORD = Advice(command=f"{_SWITCH} record learn --save run.json", effect="writes its record to a file")


def apply_record(source: str, name: str = "") -> Advice:
    """Return the advice that sets the facts of a record again, a file or a variable; `name` names a Learner or a model."""
    call = _call("apply_record", (source,), *filter(None, (name,)))
    return Advice(command=" ".join(filter(None, (f"{_SWITCH} apply", source, name))), call=call, effect="sets it again")


def repair_nan(name: str = "", rest: str = "") -> Advice:
    """Return the advice that shows which layers have to compute in float32, and the line that makes them.

    `rest`: options of the line.
    """
    command = " ".join(filter(None, (f"{_SWITCH} fix nan", name, rest)))
    return Advice(command=command, effect="shows the layers that have to compute in float32")


def in_float32(name: str, layers: Sequence[str]) -> Advice:
    """Return the line that makes layers of a Learner or a model compute in float32."""
    written = ", ".join(repr(layer) for layer in layers)
    return Advice(command=f"import nbguard; float32 = nbguard.in_float32({name}, {written})", effect="until `float32.undo()`")


# --- One thing that stands out, in one sentence, and the limit below which things are too small for that


_PART = 100
"""Holders of less than this share of the held bytes are small."""
_TOGETHER = 10
"""unless they have more than this part of it together: then one line for all would hide where the memory is."""


def least_shown(held: int) -> int:
    """Return the least bytes of a thing with its own row, finding or button, where `held` bytes are held in all.

    1 MiB, or a hundredth of the held bytes if that is more.
    """
    return max(MiB, held // _PART)


def least_of_rows(sizes: Iterable[int]) -> int:
    """Return the least bytes of a row among these that is shown by itself."""
    rows = list(sizes)
    held = sum(rows)
    least = least_shown(held)
    return MiB if sum(size for size in rows if size < least) > held // _TOGETHER else least


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence for the user, and the commands that act on it. Code stands between backticks."""

    kind: str
    sentence: str
    advice: Advice = NONE
    learner: str = ""  # the Learner that it is about as long as no fit runs on it; empty if it holds whatever runs

    @property
    def command(self) -> str:
        """Return the command that the sentence advises; empty where there is none."""
        return self.advice.command
