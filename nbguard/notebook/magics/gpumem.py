"""`%gpumem`: who holds the device's memory, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.notebook.magics import snapshots
from nbguard.notebook.magics.command_line import guarded, parse, parser, show, with_options
from nbguard.notebook.magics.simulate import switched
from nbguard.notebook.session import history, session_of

if TYPE_CHECKING:
    from nbguard.reports.cell_ledger import History
    from nbguard.reports.memory_map import MemoryMap
    from nbguard.reports.report import Report

Shown = TypeVar("Shown", "Report", "History", "MemoryMap")

_WORDS = (
    "the reference paths that keep NAME (or Out[3]) alive; the last error that ran out of memory; segments and blocks by pool, "
    "and what pins free memory; what each cell did; a line after each cell that changed memory; the cells that follow on a "
    f"simulated GPU of that size; {snapshots.HELP}"
)
_OPTIONS = parser("%gpumem", "Who holds the device's memory.")
_OPTIONS.add_argument(
    "what",
    nargs="*",
    metavar=f"why NAME | oom | map | history | cells on|off | simulate 16GiB|off | {snapshots.WORDS}",
    help=_WORDS,
)
_OPTIONS.add_argument("--device", metavar="N", help="only this device: 1, or cuda:1")
_OPTIONS.add_argument("--settings", metavar="CONF", help="with simulate: what PYTORCH_ALLOC_CONF would say, in quotes")
_OPTIONS.add_argument("--context", metavar="SIZE", help="with simulate: what CUDA itself takes of the device (0)")
_OPTIONS.add_argument(
    "-n",
    type=int,
    default=12,
    metavar="ROWS",
    help="show at most this many holders per device, or segments per pool, or cells (12)",
)
_OPTIONS.add_argument(
    "--request", metavar="SIZE", help="with map: what must go so that a request of 2GiB in one piece succeeds"
)

snapshots.add_options(_OPTIONS)


@magics_class
class GpuMemMagics(Magics):
    """The magic `%gpumem`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @with_options(_OPTIONS)
    def gpumem(self, line: str) -> Any:
        """Show who holds the device's memory: per device its parts, and the holders in columns that re-add.

        `frees now` is what comes back if this holder alone is let go, `reaches` what it leads to, `since` the cell that
        bound the name. Looking changes nothing: no context, no synchronisation, no emptied cache, no peak reset.
        Without an accelerator, CPU tensors are tracked. `%gpumem history` shows what each cell did to the memory since
        `%nbguard on`; `%gpumem cells on` says it in one line after each cell that changed something. `%gpumem map` shows
        which tensor pins which segment of the device, and what letting it go gives back. `%gpumem simulate 16GiB` runs the
        cells that follow, on the CPU as ever, against a model of such a GPU's memory.
        """
        from nbguard import api

        options = parse(_OPTIONS, line)
        if options.n < 1:
            raise UsageError("%gpumem: -n takes the number of rows to show, 1 or more")
        if options.request is not None and options.what != ["map"]:
            raise UsageError("%gpumem: --request goes with map, as in  %gpumem map --request 2GiB")
        snapshots.refuse_options(options)
        match options.what:
            case []:
                report = guarded("%gpumem", session_of(self.shell).report)
                if options.device is not None:
                    devices = [each.device for each in report.devices]
                    report = _known(report.only(options.device), options.device, devices)
                return show(self.shell, options, report, limit=options.n)
            case ["why", name]:
                return show(self.shell, options, guarded("%gpumem why", api.why, name))
            case ["history"]:
                found = guarded("%gpumem history", history)
                if options.device is not None:
                    found = _known(found.only(options.device), options.device, found.devices)
                return show(self.shell, options, found, limit=options.n)
            case ["map"]:
                if options.file is None:
                    drawn = guarded("%gpumem map", api.memory_map, options.request)
                elif options.request is None:
                    drawn = guarded("%gpumem map", snapshots.map_of, options.file)
                else:
                    raise UsageError("%gpumem map: --request asks what to let go here; a file's names cannot be let go")
                if options.device is not None:
                    drawn = _known(drawn.only(options.device), options.device, drawn.names)
                return show(self.shell, options, drawn, limit=options.n)
            case ["map", *_]:
                raise UsageError("%gpumem map: takes no name; --device 1 for one device, --request 2GiB for what that needs")
            case ["cells", "on" | "off" as state]:
                session = session_of(self.shell)
                return show(self.shell, options, guarded("%gpumem cells", session.show_cells, on=state == "on"))
            case ["cells", *_]:
                raise UsageError("%gpumem cells: say on or off, as in  %gpumem cells on")
            case ["why", *_]:
                raise UsageError("%gpumem why: give one name, as in  %gpumem why learn")
            case ["oom"]:
                card = guarded("%gpumem oom", session_of(self.shell).oom)
                if card is None:
                    raise UsageError("%gpumem oom: the last error did not run out of memory (%gpumem shows who holds what)")
                return show(self.shell, options, card)
            case ["simulate", *words]:
                state = guarded("%gpumem simulate", switched, session_of(self.shell), words, options.settings, options.context)
                return show(self.shell, options, state)
            case ["oom", *_]:
                raise UsageError("%gpumem oom: takes no name, it is about the last error")
            case ["record" | "snapshot" | "load" | "diff" | "whatif", *_]:
                return snapshots.run(self.shell, options)
            case words:
                raise UsageError(f"%gpumem: unknown word {words[0]!r} (%gpumem? shows what there is)")


def _known(found: Shown, device: str, have: Iterable[str]) -> Shown:
    """Return what was found on a device; UsageError if there is no such device."""
    if not found.devices and not getattr(found, "without", ()):
        raise UsageError(f"%gpumem: no device {device} here; there is: {', '.join(have) or 'none in use'}")
    return found
