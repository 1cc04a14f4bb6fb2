"""What a cleanup is asked for, what it will do, and what it did: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from nbguard.cleanup.plan.verdict import Verdict
from nbguard.memory.facts import PoolId
from nbguard.memory.processes import Process, Zombies
from nbguard.memory.target import Target
from nbguard.render.result import Result

ActionKind = Literal[
    "del",
    "out",
    "error",
    "kept_error",
    "debugger",
    "leftovers",
    "cache",
    "collect",
    "park",
    "compiled",
    "workers",
    "pinned",
    "workspaces",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `%reset_gpu` was asked for. No targets and not `everything`: all that is stale.

    `errors`: also what exceptions hold that the user keeps; `compiled`: also what torch.compile has compiled.
    `only_error`: of that, only what the last error holds and what its fit has left on its Learner.
    `workers`: DataLoaders' idle workers and unused pinned host memory too; `only_workers`: nothing but these. `hard`: also
    what a library keeps and can make anew, and a verdict on what is left. `while_busy`: code of the user's runs meanwhile, so
    nothing is let go but the last error, displayed results, an ended debugger and unreachable cycles.
    """

    targets: tuple[Target, ...] = ()
    keep: tuple[str, ...] = ()
    everything: bool = False
    errors: bool = False
    compiled: bool = False
    only_error: bool = False
    workers: bool = False
    hard: bool = False
    only_workers: bool = False
    while_busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One step of a plan. `nbytes` come back by it, after the steps before it; None: cannot be known before.

    `refs` are ids of the objects concerned (a displayed object, frames with the locals to release, a Learner), so that
    the step finds them again; `names` the attribute or variable names. They mean nothing once the plan has run.
    `host` are bytes of host memory that come back beside `nbytes`, as counted before; `processes` what is to end.
    """

    kind: ActionKind
    label: str
    nbytes: int | None
    detail: str = ""
    refs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    host: int = 0
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Result):
    """What a cleanup will do, and the bytes it promises.

    `storages` are the numbers of the storages that will be gone; `reserved` the bytes that go back to the device, where
    segments are known; `pools` the private pools that stay in use. `skipped` says in words what was asked for but will not be
    done, and why.
    """

    kind: ClassVar[str] = "plan"
    view: ClassVar[str] = "nbguard.cleanup.plan.plan_view:plan_blocks"

    request: Request
    actions: tuple[Action, ...] = ()
    storages: frozenset[int] = frozenset()
    promised: int = 0
    reserved: int | None = None
    skipped: tuple[str, ...] = ()
    pools: frozenset[PoolId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Result):
    """What a cleanup did, measured.

    `realised` counts the storages that are really gone (their weak references expired) among those promised, `extra` those
    beyond. `done` and `undone` are the labels of the actions that ran and those that did not, with the reason.
    `reserved` is (before, after) of the allocator; `left` what holds the rest: (holder, bytes, hint). `host` are the bytes
    of host memory that came back besides, None if that was not asked for; `verdict` and `zombies` come with `--hard`.
    """

    kind: ClassVar[str] = "outcome"
    view: ClassVar[str] = "nbguard.cleanup.plan.plan_view:outcome_blocks"

    plan: Plan
    done: tuple[Action, ...]
    undone: tuple[tuple[str, str], ...]
    realised: int
    extra: int
    before: int
    after: int
    reserved: tuple[int, int] | None = None
    survivors: tuple[tuple[str, int], ...] = ()
    left: tuple[tuple[str, int, str], ...] = ()
    interrupted: bool = False
    host: int | None = None
    verdict: Verdict | None = None
    zombies: Zombies | None = None
