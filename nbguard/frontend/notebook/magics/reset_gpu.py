"""`%reset_gpu`: gives memory back, on this kernel or on engines of a cluster, by a plan that says beforehand how much."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.errors import NbguardError
from nbguard.frontend.grammar import Add, Word
from nbguard.frontend.notebook.display import display_bundle
from nbguard.frontend.notebook.magics.command_line import MagicGrammar, documented, guarded, show
from nbguard.frontend.notebook.session import session_of

if TYPE_CHECKING:
    from nbguard.frontend.cluster.analysis import EnginesCleanup, EnginesReport
    from nbguard.memory.cleanup.plan.parking import Unparked
    from nbguard.memory.cleanup.plan.plan import Outcome, Plan
    from nbguard.memory.core.processes import Zombies


# --- `--engines`: the memory of the engines of an ipyparallel cluster, and their cleanup, the plan of each shown first.


def engines_report(namespace: Mapping[str, object]) -> EnginesReport:
    """Return the memory of the engines of the notebook's cluster.

    Raises:
        NbguardError: no name, or more than one, leads to a client of a cluster, or it has no engines.
    """
    from nbguard.frontend.cluster.engine import engines

    return engines(_client(namespace))


def engines_cleanup(
    namespace: Mapping[str, object], targets: Collection[str], choices: Mapping[str, Any], *, dry_run: bool
) -> EnginesCleanup:
    """Return the plans of the engines of the notebook's cluster; without `dry_run` show them, and return their outcomes.

    Raises:
        NbguardError: as `engines_report`.
    """
    from nbguard.frontend.cluster.engine import plan_engines, release_engines

    client = _client(namespace)
    plans = plan_engines(client, targets, choices)
    if dry_run:
        return plans
    display_bundle(plans.mimebundle())
    return release_engines(client, plans, targets, choices)


def _client(namespace: Mapping[str, object]) -> Any:
    from nbguard.frontend.cluster.engine import clients_in

    clients = clients_in(namespace)
    if not clients:
        raise NbguardError("no name here is the client of a cluster: make one, as in  rc = ipyparallel.Client()")
    if len(clients) > 1:
        names = list(clients)
        raise NbguardError(f"{', '.join(names)} are clients of clusters: ask one, as in  nbguard.engines({names[-1]})")
    return next(iter(clients.values()))


_NAME = "%reset_gpu"


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"--zombies takes pids only, not {text} ({_NAME} {text} frees a name)")
    return int(text)


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "targets": {"nargs": "*", "default": [], "help": "what to free, as after del: learn  runs['a']  exp.learn  Out[3]"},
    "--dry-run": {"action": "store_true", "help": "show the plan with its bytes and touch nothing"},
    "--keep": {
        "nargs": "+",
        "default": [],
        "metavar": "NAME",
        "help": "names (with --all) or displayed results that must stay",
    },
    "--all": {
        "action": "store_true",
        "help": "free stale memory and every name that leads to device memory, except names after --keep",
    },
    "--errors": {
        "action": "store_true",
        "help": "also free memory held by exceptions that a variable, future or task keeps; the exceptions stay",
    },
    "--compiled": {"action": "store_true", "help": "also drop torch.compile's compiled code; live models compile again"},
    "--caches": {
        "action": "store_true",
        "help": "also empty function caches (lru_cache) that alone keep memory alive; this cannot be undone",
    },
    "--park": {"nargs": "+", "metavar": "NAME", "help": "move the tensors of NAME into host memory; every name stays valid"},
    "--unpark": {"nargs": "*", "metavar": "NAME", "help": "bring back the tensors parked as NAME, or everything"},
    "--workers": {
        "action": "store_true",
        "help": "also end idle DataLoader worker processes and give unused pinned host memory back",
    },
    "--engines": {
        "action": "store_true",
        "help": "clean up each engine of an ipyparallel cluster; its plan is shown first",
    },
    "--zombies": {
        "action": "store_true",
        "help": "list the other processes on the GPUs (with pids: only those), and mark those that a dead program of "
        "yours left behind",
    },
    "pids": {"nargs": "*", "type": _pid, "metavar": "PID", "help": "with --zombies: only these processes"},
    "--yes": {"action": "store_true", "help": "with --zombies or --hard: end those leftovers"},
    "--hard": {
        "action": "store_true",
        "help": "do every cleanup that needs no consent (--workers, cuBLAS workspaces, the list of --zombies), then say "
        "whether only a restart of the kernel would give more back",
    },
}
"""The settings of each argument for argparse."""

_MORE = ("--keep", "--errors", "--compiled", "--caches", "--workers")
_ALONE = "--park NAMES and --unpark NAMES go alone, one of them at a time"


def _adding(*groups: str | tuple[str, ...]) -> Add:
    """Return a function that adds arguments by name; of those in one tuple a line may have one."""

    def add(options: argparse.ArgumentParser) -> None:
        for group in groups:
            to = options if isinstance(group, str) else options.add_mutually_exclusive_group()
            for name in (group,) if isinstance(group, str) else group:
                to.add_argument(name, **_ARGUMENTS[name])

    return add


GRAMMAR = MagicGrammar(
    _NAME,
    Word(
        help="Free stale memory, or just the targets.",
        advice="--yes works with --zombies or --hard and ends processes that a dead program left on the GPUs",
        add=_adding(("targets", "--all"), *_MORE, "--dry-run"),
    ),
    {
        "--park": Word(advice=_ALONE, add=_adding("--park", "--dry-run")),
        "--unpark": Word(advice=f"{_ALONE}; %gpumem says what is parked", add=_adding("--unpark")),
        "--zombies": Word(
            advice="--zombies takes no other option (--hard lists the same and also cleans up)",
            add=_adding("--zombies", "pids", ("--yes", "--dry-run")),
        ),
        "--engines": Word(
            advice="--engines cleans up in every engine; --park, --zombies and --hard are of this kernel alone",
            add=_adding("--engines", ("targets", "--all"), *_MORE, "--dry-run"),
        ),
        "--hard": Word(
            advice="--hard takes no targets: free them first, with  %reset_gpu TARGETS",
            add=_adding("--hard", "--all", *_MORE, ("--yes", "--dry-run")),
        ),
    },
    add_all=_adding(*_ARGUMENTS),
)


@magics_class
class ResetGpuMagics(Magics):
    """The magic `%reset_gpu`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @documented(GRAMMAR)
    def reset_gpu(self, line: str) -> Plan | Outcome | Unparked | Zombies | EnginesCleanup | None:
        """Free stale memory, which only the last error, displayed results, unreachable cycles and the like still hold.

        Memory that a name of yours leads to is never freed by default. With targets, their names are deleted and the memory
        that only they hold is freed, with the leftovers that keep that memory. What is stale besides stays, and the plan says
        how much that is. Only references are removed, never contents; `%tb` and `%debug` keep working. Afterwards the bytes
        that came back are measured and shown beside the promise. `--engines` does it in every engine of an ipyparallel cluster.
        `--park NAMES` moves an experiment out of the way instead, `--unpark NAMES` brings it back as it was.

        Processes are ended only on request, each identified by its pid and start time, and nbguard verifies that they are
        gone. It never ends workers that running code uses, a live kernel, or another user's process.
        """
        names = getattr(self.shell, "user_ns", {})
        options = GRAMMAR.parse(line, names)
        if options is None:
            return None
        if options.word == "--engines":
            choices = {**_choices(options), "everything": options.all}
            call = partial(engines_cleanup, names, options.targets, choices, dry_run=options.dry_run)
            return show(self.shell, options, guarded(f"{_NAME} --engines", call))
        from nbguard import api
        from nbguard.memory.cleanup.plan.plan import Outcome

        session = session_of(self.shell)
        session.notices.expect_cleanup()
        done = self._done(api, options)
        simulation = session.memory.simulation
        if type(done) is Outcome and simulation is not None:
            simulation.empty_cache()  # as a cleanup does on a device
        return show(self.shell, options, done)

    @staticmethod
    def _done(api: Any, options: argparse.Namespace) -> Plan | Outcome | Unparked | Zombies:
        """Carry out the options and return the result."""
        match options.word:
            case "--park":
                parked: Plan | Outcome = guarded("%reset_gpu --park", api.park, *options.park, dry_run=options.dry_run)
                return parked
            case "--unpark":
                unparked: Unparked = guarded("%reset_gpu --unpark", api.unpark, *options.unpark)
                return unparked
            case "--zombies":
                zombies: Callable[..., Zombies] = api.end_zombies if options.yes else api.zombies
                return guarded(_NAME, zombies, *options.pids)
        call: Callable[..., Plan | Outcome] = api.plan if options.dry_run else api.release
        choices = _choices(options)
        is_hard = options.word == "--hard"
        if is_hard and options.yes:
            choices["orphans"] = True
        targets = () if is_hard else options.targets
        return guarded(_NAME, call, *targets, everything=options.all, hard=is_hard, **choices)


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a plan that more than one form has."""
    return {name: getattr(options, name) for name in ("keep", "errors", "compiled", "caches", "workers")}
