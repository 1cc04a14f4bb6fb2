"""`%reset_gpu`: gives memory back, on this kernel or on engines of a cluster, by a plan that says beforehand how much."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.errors import NbguardError
from nbguard.frontend.notebook.display import display_bundle
from nbguard.frontend.notebook.magics.command_line import (
    asks_for_help,
    complaint_of,
    guarded,
    parser,
    show,
    split,
    with_options,
)
from nbguard.frontend.notebook.magics.grammar import MagicOfOptions, of_another_magic, option_of_another_magic
from nbguard.frontend.notebook.session import session_of
from nbguard.spelling import unknown_arguments

if TYPE_CHECKING:
    from IPython.core.magic_arguments import MagicArgumentParser

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


NAME = "%reset_gpu"
"""The magic."""


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"--zombies takes pids only, not {text} ({NAME} {text} frees a name)")
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

OPTIONS = frozenset(name for name in _ARGUMENTS if name.startswith("--"))
"""The options of the magic, in any form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to use the magic: the option that stands for it, and the arguments that go with it."""

    option: str  # that chooses this form; empty if none
    arguments: tuple[str | tuple[str, ...], ...]  # that go together; of those in a tuple of their own, one at a time
    advice: str  # the next step after an option that goes with another form


_MORE = ("--keep", "--errors", "--compiled", "--caches", "--workers")
_ALONE = "--park NAMES and --unpark NAMES go alone, one of them at a time"
_FORMS = (
    Form(option="--park", arguments=("--park", "--dry-run"), advice=_ALONE),
    Form(option="--unpark", arguments=("--unpark",), advice=f"{_ALONE}; %gpumem says what is parked"),
    Form(
        option="--zombies",
        arguments=("--zombies", "pids", ("--yes", "--dry-run")),
        advice="--zombies takes no other option (--hard lists the same and also cleans up)",
    ),
    Form(
        option="--engines",
        arguments=("--engines", ("targets", "--all"), *_MORE, "--dry-run"),
        advice="--engines cleans up in every engine; --park, --zombies and --hard are of this kernel alone",
    ),
    Form(
        option="--hard",
        arguments=("--hard", "--all", *_MORE, ("--yes", "--dry-run")),
        advice=f"--hard takes no targets: free them first, with  {NAME} TARGETS",
    ),
    Form(
        option="",
        arguments=(("targets", "--all"), *_MORE, "--dry-run"),
        advice="--yes works with --zombies or --hard and ends processes that a dead program left on the GPUs",
    ),
)


@cache
def _parser(form: Form) -> MagicArgumentParser:
    options = parser(NAME, "Free stale memory, or just the targets.")
    for argument in form.arguments:
        group = options if isinstance(argument, str) else options.add_mutually_exclusive_group()
        for name in (argument,) if isinstance(argument, str) else argument:
            group.add_argument(name, **_ARGUMENTS[name])
    return options


@cache
def _help() -> MagicArgumentParser:
    """Return a parser with the arguments of all forms, for the help: their usage line by line, each argument once."""
    options = _parser(Form(option="", arguments=tuple(_ARGUMENTS), advice=""))
    usages = [_parser(form).format_usage().partition(": ")[2].rstrip() for form in reversed(_FORMS)]
    options.usage = "\n       ".join(usages).replace("%", "%%")
    return options


def _parse(line: str) -> argparse.Namespace | None:
    """Return the parsed line; None if it asked for help, which is shown.

    Raises:
        UsageError: the line cannot be read, or options do not go together; one line says why, and what to do next.
    """
    texts = split(line)
    if asks_for_help(texts):
        sys.stdout.write(_help().format_help())
        return None
    return options_of(texts)


def options_of(texts: Sequence[str]) -> argparse.Namespace:
    """Return the options of a line's words.

    Raises:
        UsageError: they cannot be read, or options do not go together; one line says why, and what to do next.
    """
    form = next(form for form in _FORMS if form.option in ("", *(text.partition("=")[0] for text in texts)))
    try:
        options, unknown = _parser(form).parse_known_args([*texts])
    except (UsageError, argparse.ArgumentError) as error:
        raise UsageError(f"{NAME}: {complaint_of(error)} ({NAME}? shows the options)") from None
    if unknown:
        if elsewhere := option_of_another_magic(NAME, unknown, texts):
            raise UsageError(f"{NAME}: {elsewhere}")
        advice = f": {form.advice}" if form.option or unknown[0].partition("=")[0] in _ARGUMENTS else ""
        raise UsageError(f"{NAME}: {unknown_arguments(unknown, OPTIONS)}{advice} ({NAME}? shows the options)")
    return options


MagicOfOptions(NAME, OPTIONS, options_of)


@magics_class
class ResetGpuMagics(Magics):
    """The magic `%reset_gpu`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @with_options(_help)
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
        from nbguard import api
        from nbguard.memory.cleanup.plan.plan import Outcome

        options = _parse(line)
        if options is None:
            return None
        names = getattr(self.shell, "user_ns", {})
        first = next(iter(getattr(options, "targets", ())), "")
        if first and first not in names:
            others = [text for text in split(line) if text != first]
            if elsewhere := of_another_magic(NAME, [first, *others]):
                raise UsageError(f"{NAME}: {elsewhere}")
        if "engines" in options:
            choices = {**_choices(options), "everything": options.all}
            call = partial(engines_cleanup, names, options.targets, choices, dry_run=options.dry_run)
            return show(self.shell, options, guarded(f"{NAME} --engines", call))
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
        if "park" in options:
            parked: Plan | Outcome = guarded("%reset_gpu --park", api.park, *options.park, dry_run=options.dry_run)
            return parked
        if "unpark" in options:
            unparked: Unparked = guarded("%reset_gpu --unpark", api.unpark, *options.unpark)
            return unparked
        if "zombies" in options:
            zombies: Callable[..., Zombies] = api.end_zombies if options.yes else api.zombies
            return guarded(NAME, zombies, *options.pids)
        call: Callable[..., Plan | Outcome] = api.plan if options.dry_run else api.release
        choices = _choices(options)
        is_hard = "hard" in options
        if is_hard and options.yes:
            choices["orphans"] = True
        targets = () if is_hard else options.targets
        return guarded(NAME, call, *targets, everything=options.all, hard=is_hard, **choices)


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a plan that more than one form has."""
    return {name: getattr(options, name) for name in ("keep", "errors", "compiled", "caches", "workers")}
