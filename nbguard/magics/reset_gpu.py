"""`%reset_gpu`: give memory back, after saying what will be freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.magics.command_line import guarded, parse, parser, show, with_options

if TYPE_CHECKING:
    from nbguard.core.plan import Outcome, Plan

_OPTIONS = parser("%reset_gpu", "Free what is stale, or just the targets.")
_OPTIONS.add_argument("targets", nargs="*", help="what to free, as after del: learn  runs['a']  exp.learn  Out[3]")
_OPTIONS.add_argument("--dry-run", action="store_true", help="show the plan with its bytes and touch nothing")
_OPTIONS.add_argument(
    "--keep", nargs="+", default=[], metavar="NAME", help="names (with --all) or displayed results that must stay"
)
_OPTIONS.add_argument("--all", action="store_true", dest="everything", help="free every name that leads to device memory")


@magics_class
class ResetGpuMagics(Magics):
    """The magic `%reset_gpu`."""

    replaced: dict[str, Any]

    @line_magic
    @with_options(_OPTIONS)
    def reset_gpu(self, line: str) -> Plan | Outcome | None:
        """Free what is stale: what only the last error, displayed results or unreachable cycles still hold.

        What a name of yours leads to is never freed by default. With targets, their names are deleted and what only they
        (and the leftovers that point to them) hold is freed, nothing else. Only references are removed, never contents;
        `%tb` and `%debug` go on working. Afterwards the bytes that came back are measured and shown beside the promise.
        """
        from nbguard import api

        options = parse(_OPTIONS, line)
        if options.everything and options.targets:
            raise UsageError("%reset_gpu: give targets or --all, not both (--all --keep NAME keeps a name)")
        call: Callable[..., Plan | Outcome] = api.plan if options.dry_run else api.release
        result = guarded("%reset_gpu", call, *options.targets, keep=options.keep, everything=options.everything)
        return show(self.shell, options, result)
