"""`%reset_gpu`: give memory back, after saying what will be freed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.notebook.magics.command_line import guarded, parse, parser, show, with_options

if TYPE_CHECKING:
    from nbguard.cleanup.plan.parking import Unparked
    from nbguard.cleanup.plan.plan import Outcome, Plan
    from nbguard.memory.processes import Zombies

_MODES = ("everything", "errors", "compiled", "workers", "hard")
_OPTIONS = parser("%reset_gpu", "Free what is stale, or just the targets.")
_OPTIONS.add_argument("targets", nargs="*", help="what to free, as after del: learn  runs['a']  exp.learn  Out[3]")
_OPTIONS.add_argument("--dry-run", action="store_true", help="show the plan with its bytes and touch nothing")
_OPTIONS.add_argument(
    "--keep", nargs="+", default=[], metavar="NAME", help="names (with --all) or displayed results that must stay"
)
_OPTIONS.add_argument("--all", action="store_true", dest="everything", help="free every name that leads to device memory")
_OPTIONS.add_argument(
    "--errors", action="store_true", help="also what exceptions hold that a variable, future or task keeps; they stay"
)
_OPTIONS.add_argument("--compiled", action="store_true", help="also what torch.compile has compiled; live models compile again")
_OPTIONS.add_argument(
    "--park", nargs="+", metavar="NAME", help="move what NAME leads to into host memory; every name stays valid"
)
_OPTIONS.add_argument("--unpark", nargs="*", metavar="NAME", help="bring back what was parked as NAME, or everything")
_OPTIONS.add_argument(
    "--workers",
    action="store_true",
    help="also end the worker processes of DataLoaders that no running code uses, and give unused pinned host memory back",
)
_OPTIONS.add_argument(
    "--zombies",
    action="store_true",
    help="list what is on the GPUs besides this kernel, and which of it a dead program of yours left behind; pids as targets: "
    "only these",
)
_OPTIONS.add_argument("--yes", action="store_true", help="with --zombies or --hard: end those leftovers")
_OPTIONS.add_argument(
    "--hard",
    action="store_true",
    help="all of it that needs no consent: --workers, cuBLAS workspaces, the list of --zombies; then say whether only a "
    "restart of the kernel would give more back",
)


@magics_class
class ResetGpuMagics(Magics):
    """The magic `%reset_gpu`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @with_options(_OPTIONS)
    def reset_gpu(self, line: str) -> Plan | Outcome | Unparked | Zombies | None:
        """Free what is stale: what only the last error, displayed results or unreachable cycles still hold.

        What a name of yours leads to is never freed by default. With targets, their names are deleted and what only they
        (and the leftovers that point to them) hold is freed, nothing else. Only references are removed, never contents;
        `%tb` and `%debug` go on working. Afterwards the bytes that came back are measured and shown beside the promise.
        `--park NAMES` moves an experiment out of the way instead, `--unpark NAMES` brings it back as it was.

        Processes are ended only on request, by pid and start, and it is verified that they are gone: never workers in use by
        what runs, never a live kernel, never another user's process.
        """
        from nbguard import api

        options = parse(_OPTIONS, line)
        if options is None:
            return None
        if mistake := _contradiction(options):
            raise UsageError(f"%reset_gpu: {mistake}")
        return show(self.shell, options, self._done(api, options))

    @staticmethod
    def _done(api: Any, options: argparse.Namespace) -> Plan | Outcome | Unparked | Zombies:
        """Do what the options ask for and return what came of it."""
        if options.park is not None:
            parked: Plan | Outcome = guarded("%reset_gpu --park", api.park, *options.park, dry_run=options.dry_run)
            return parked
        if options.unpark is not None:
            unparked: Unparked = guarded("%reset_gpu --unpark", api.unpark, *options.unpark)
            return unparked
        if options.zombies:
            zombies: Callable[..., Zombies] = api.end_zombies if options.yes else api.zombies
            return guarded("%reset_gpu", zombies, *map(int, options.targets))
        call: Callable[..., Plan | Outcome] = api.plan if options.dry_run else api.release
        choices = {name: getattr(options, name) for name in ("keep", *_MODES)}
        if options.yes:
            choices["orphans"] = True
        return guarded("%reset_gpu", call, *options.targets, **choices)


def _contradiction(options: argparse.Namespace) -> str:
    """Return what is wrong with options that do not go together, and what to write instead; an empty string if they do."""
    others = options.targets or options.keep or options.zombies or any(getattr(options, name) for name in _MODES)
    parking = [option for option in (options.park, options.unpark) if option is not None]
    if parking and (others or len(parking) > 1):
        return "--park NAMES and --unpark NAMES go alone, one of them at a time"
    if options.unpark is not None and options.dry_run:
        return "there is no --dry-run of --unpark (%gpumem says what is parked)"
    if options.everything and options.targets:
        return "give targets or --all, not both (--all --keep NAME keeps a name)"
    if options.yes and options.dry_run:
        return "give --yes or --dry-run, not both (--zombies alone only lists)"
    if options.yes and not (options.zombies or options.hard):
        return "--yes goes with --zombies or --hard: it ends what a dead program left on the GPUs"
    if options.zombies and (options.keep or any(getattr(options, name) for name in _MODES)):
        return "--zombies stands alone (--hard lists the same and cleans up, too)"
    if options.zombies and (words := [word for word in options.targets if not (word.isdecimal() and word.isascii())]):
        return f"--zombies takes pids only, not {words[0]} (%reset_gpu {words[0]} frees a name)"
    if options.hard and options.targets:
        return "--hard takes no targets: free them first, with  %reset_gpu TARGETS"
    return ""
