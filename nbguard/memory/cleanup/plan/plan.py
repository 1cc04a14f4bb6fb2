"""Cleanups as plain data, with the request, the plan, the outcome, and the verdict on a restart of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from nbguard.memory.core import advice
from nbguard.memory.core.advice import NONE, Advice
from nbguard.memory.core.analysis import NOT_OURS, Analysis, DeviceAnalysis, DevicePart, parts_of
from nbguard.memory.core.facts import DEBUGGER, CacheKind, Facts, HolderSource, PoolId, Target
from nbguard.memory.core.processes import Process, Zombies
from nbguard.memory.core.references.graph import STALE_KINDS, Edge
from nbguard.memory.core.references.holders import Holder, unheld
from nbguard.memory.core.references.partners import KeptTarget
from nbguard.render.result import Result
from nbguard.units import MiB, counted, format_bytes

# --- The verdict after the hardest cleanup on the memory still taken and on a restart of the kernel. Pure.


_WORTH_A_RESTART = 64 * MiB
_SHARE = 0.01
"""A restart is worth it from so many bytes, and this share of the device, that nothing else gives back besides the context."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A part of the memory that the kernel still takes. `needs_restart`: no command gives it back."""

    name: str
    nbytes: int
    note: str
    needs_restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The memory that this kernel still takes of the devices, and the effect of a restart. All sizes are bytes."""

    rest: tuple[Rest, ...]  # parts that add up to `total`
    total: int  # bytes that this kernel takes of the devices
    gain: int  # bytes that only a restart gives back, the context's included
    is_needed: bool  # a restart is worth it, or CUDA answers nothing else
    loses: int  # number of names that lead to memory and that a restart loses
    reason: str  # all of it in a sentence


_NOTES = {
    "your names": advice.PLACEHOLDER.code + " or " + advice.EVERYTHING.code + " frees it",
    "running code": "freed when it ends",
    "kept results": "displayed results and copies that are kept: " + advice.REPORT.command + " names each",
    "libraries": "none of your names leads to it",
    "cuBLAS workspaces": "cleared by " + advice.HARD.code + " when nothing runs and no CUDA graph is there",
    "CUDA graphs": "of graph pools that no Python object holds",
    "not held by Python": "buffers and caches of C++ libraries",
    "free, but not returnable": "freed with its neighbouring blocks, or with its pool's CUDA graph",
    "context": "CUDA itself in this kernel",
}
_CLASSES: dict[HolderSource, str] = {"workspaces": "cuBLAS workspaces", "graphs": "CUDA graphs"}
_RESTART = ("libraries", "CUDA graphs", "not held by Python", "context")


def verdict(analysis: Analysis, broken: str = "") -> Verdict:
    """Return the verdict on a scan; `broken` is the error that CUDA answers every call with, if it does."""
    facts = analysis.facts
    sums: dict[str, int] = {}
    for device in analysis.devices:
        for name, nbytes in _parts(device):
            sums[name] = sums.get(name, 0) + nbytes
    rest = tuple(Rest(name, sums[name], _NOTES[name], name in _RESTART) for name in _NOTES if sums.get(name))
    total = sum(part.nbytes for part in rest)
    gain = sum(part.nbytes for part in rest if part.needs_restart)
    beside_context = gain - sums.get("context", 0)
    size = sum(device.total or 0 for device in facts.devices)
    is_needed = bool(broken) or beside_context >= max(_WORTH_A_RESTART, _SHARE * size)
    names = sum(root.kind in ("name", "module") for root in facts.graph.roots)
    return Verdict(
        rest=rest,
        total=total,
        gain=gain,
        is_needed=is_needed,
        loses=names,
        reason=_reason(rest, gain, is_needed, names, broken),
    )


def _parts(device: DeviceAnalysis) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each part of a device that this kernel takes, as in the report's bar and table."""
    facts = device.analysis.facts
    rows = (*(holder for holder, _ in device.holdings), *unheld(facts, device.facts))
    for row in rows:
        yield _class_of(facts, row), row.retained
    allocated = sum(row.retained for row in rows)
    for part in parts_of(device.facts, allocated, facts.pid, device.analysis.pools_in_use, device.space):
        if part.name in (DevicePart.CONTEXT, DevicePart.LIBRARIES):
            yield part.label, part.nbytes
        elif part.name != DevicePart.ALLOCATED and part.name not in NOT_OURS:
            yield "free, but not returnable", part.nbytes


def _class_of(facts: Facts, row: Holder) -> str:
    if row.source != "python":
        return _CLASSES.get(row.source, "not held by Python")
    kinds = {facts.graph.roots[root].kind for root in row.roots}
    if kinds & {"name", "module"}:
        return "your names"
    if "frame" in kinds:
        return "running code"
    return "kept results" if kinds & STALE_KINDS else "libraries"


def _reason(rest: tuple[Rest, ...], gain: int, is_needed: bool, names: int, broken: str) -> str:
    what = ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in rest if part.needs_restart)
    leading = counted(names, "name that leads", "names that lead")
    loses = f"it loses every variable, {leading} to memory among them"
    if broken:
        return f"a restart of the kernel is needed because CUDA answers every call with an error ({broken}); {loses}"
    if not gain:
        return "a restart of the kernel is not needed, because commands give everything back"
    if is_needed:
        return f"only a restart of the kernel gives back {format_bytes(gain)} more ({what}); {loses}"
    return f"a restart of the kernel is not needed, because it would give back only {format_bytes(gain)} ({what})"


ActionKind = Literal[
    "del",
    "cut",
    "line",
    "out",
    "error",
    "kept_error",
    "debugger",
    "leftovers",
    "cache",
    "collect",
    "park",
    "compiled",
    "function_cache",
    "workers",
    "pinned",
    "workspaces",
]


_KEYS: dict[str, str] = {"error": "last error", "debugger": DEBUGGER}
"""The label of the root that a step lets go of, by the kind of the step: it stays the same whatever else the step says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to clean up. No targets and not `everything`: all that is stale."""

    targets: tuple[Target, ...] = ()  # names and expressions to release
    keep: tuple[str, ...] = ()  # names or displayed results (`Out[3]`) that must stay, and keys of steps to leave out
    everything: bool = False  # every name that leads to device memory, and stale memory
    errors: bool = False  # also the memory of exceptions that the user keeps; the exceptions stay
    compiled: bool = False  # also the code that torch.compile has compiled
    caches: bool = False  # also the caches of functions (lru_cache) that alone keep device memory; they cannot be filled again
    only_error: bool = False  # nothing but the memory that only the last error holds, and its fit's leftovers on its Learner
    workers: bool = False  # also idle workers of DataLoaders and unused pinned host memory
    hard: bool = False  # also memory that a library keeps and can make again, and a verdict on the rest
    only_workers: bool = False  # nothing but workers and pinned host memory
    while_busy: bool = False  # code of the user's runs meanwhile: only the last error, displayed results, debuggers, cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One step of a plan."""

    kind: ActionKind  # which chooses the step that does it
    subject: str  # the object of the step in words: `last error: 2 variables of 1 frame`
    participle: str  # the verb of the step: `released`
    label: str = field(init=False)  # the step once it is taken: `last error: 2 variables of 1 frame released`
    future: str = field(init=False)  # the step before it is taken: `last error: 2 variables of 1 frame will be released`
    nbytes: int | None  # bytes that come back by it, after the steps before it; None if it cannot be known before
    detail: str = ""  # the consequence in words
    refs: tuple[int, ...] = ()  # ids of the objects concerned, for the step to find them; no longer valid once it has run
    names: tuple[str, ...] = ()  # attributes, variables or labels concerned
    host: int | None = 0  # bytes of host memory that come back besides, as counted before; None if unknown
    processes: tuple[Process, ...] = ()  # worker processes to end
    cache: CacheKind = ""  # of a step that forgets a cache's object: which cache

    def __post_init__(self) -> None:
        """Make the two sentences that are shown of the subject and the verb."""
        object.__setattr__(self, "label", f"{self.subject} {self.participle}")
        object.__setattr__(self, "future", f"{self.subject} will be {self.participle}")

    @property
    def key(self) -> str:
        """Return the words that leave the step out of a request (`Request.keep`)."""
        if self.names and self.kind in ("del", "cut", "line", "out", "park", "cache"):
            return self.names[0]
        return _KEYS.get(self.kind, self.subject)

    @property
    def undone(self) -> str:
        """Return the step that was not taken, in words: `2 workers of dls not ended`."""
        return f"{self.subject} not {self.participle}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Result):
    """The steps of a cleanup, and the bytes that it promises."""

    kind: ClassVar[str] = "plan"
    view: ClassVar[str] = "nbguard.memory.cleanup.plan.plan_view:plan_blocks"

    request: Request  # that it meets
    actions: tuple[Action, ...] = ()  # steps in the order of their run
    storages: frozenset[int] = frozenset()  # numbers of the storages in the graph that will be gone
    gone: frozenset[int] = field(default=frozenset(), metadata={"json": False})  # numbers of the roots that the steps remove
    cut: frozenset[Edge] = field(default=frozenset(), metadata={"json": False})  # references that the steps remove
    promised: int = 0  # bytes of these storages, and of workspaces that are cleared
    at_least: bool = False  # the removed objects lead to something that the scan left out: `promised` is a lower bound
    at_most: int | None = None  # bytes that may come back then, by the allocator's count; None if unknown
    reserved: int | None = None  # bytes that go back to the device; None where segments are not known
    reserved_at_most: int | None = None  # the same, if private pools are free that may or may not be in use
    stranded: int | None = None  # bytes of the promise that do not: other blocks pin their segments; None as with `reserved`
    skipped: tuple[str, ...] = ()  # sentences on requests that will not be carried out, and why
    pools: frozenset[PoolId] = frozenset()  # private pools of the allocator that stay in use, as far as is known
    doubtful: frozenset[PoolId] = frozenset()  # those of `pools` that nothing known keeps then: they may be in use and may not
    kept: tuple[KeptTarget, ...] = ()  # targets whose release would free nothing: they are not deleted
    also_stale: int = 0  # bytes that are stale besides and that a plan for targets leaves alone: the default cleanup frees them


LEFT_SHOWN = 3
"""Holders left alone that a cleanup shows, each with its way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftHolder:
    """A holder that a cleanup left alone."""

    label: str  # the user's name for it
    nbytes: int  # bytes that no other holder has; 0 if others have all of them
    what: str  # the object in a few words
    advice: Advice = NONE  # its way out; only the `LEFT_SHOWN` largest have one
    is_part: bool = False  # its bytes are among those of another holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Result):
    """The outcome of a cleanup, measured. All sizes are bytes."""

    kind: ClassVar[str] = "outcome"
    view: ClassVar[str] = "nbguard.memory.cleanup.plan.plan_view:outcome_blocks"

    plan: Plan  # that was carried out
    done: tuple[Action, ...]  # steps that ran
    undone: tuple[tuple[str, str], ...]  # (label, reason) of steps that did not
    realised: int  # promised storages that are really gone: their weak references expired
    extra: int  # storages that are gone besides
    before: int  # tensors' storages before it
    after: int  # tensors' storages after it
    reserved: tuple[int, int] | None = None  # (before, after) of the allocator (memory_reserved); None without CUDA
    survivors: tuple[tuple[str, int], ...] = ()  # (holder, bytes) of promised storages that are still there
    left: tuple[LeftHolder, ...] = ()  # the rest, the largest first
    interrupted: bool = False  # by the user, in the midst of it
    host: int | None = None  # host memory that came back besides; None if not asked for
    verdict: Verdict | None = None  # comes with `--hard`
    zombies: Zombies | None = None  # comes with `--hard`
