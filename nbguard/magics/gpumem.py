"""`%gpumem`: who holds the device's memory, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.magics.command_line import guarded, parse, parser, show, with_options

if TYPE_CHECKING:
    from nbguard.core.report import Report
    from nbguard.core.why import Why

_OPTIONS = parser("%gpumem", "Who holds the device's memory.")
_OPTIONS.add_argument("what", nargs="*", metavar="why NAME", help="the reference paths that keep NAME (or Out[3]) alive")
_OPTIONS.add_argument("--device", metavar="N", help="only this device: 1, or cuda:1")
_OPTIONS.add_argument("-n", type=int, default=12, metavar="ROWS", help="show at most this many holders per device (12)")


@magics_class
class GpuMemMagics(Magics):
    """The magic `%gpumem`."""

    replaced: dict[str, Any]

    @line_magic
    @with_options(_OPTIONS)
    def gpumem(self, line: str) -> Report | Why | None:
        """Show who holds the device's memory: per device its parts, and the holders in columns that re-add.

        `frees now` is what comes back if this holder alone is let go, `reaches` what it leads to, `since` the cell that
        bound the name. Looking changes nothing: no context, no synchronisation, no emptied cache, no peak reset.
        Without an accelerator, CPU tensors are tracked.
        """
        from nbguard import api

        options = parse(_OPTIONS, line)
        if options.n < 1:
            raise UsageError("%gpumem: -n takes the number of rows to show, 1 or more")
        match options.what:
            case []:
                report = guarded("%gpumem", api.report)
                if options.device is not None:
                    report = self._only(report, options.device)
                return show(self.shell, options, report, limit=options.n)
            case ["why", name]:
                return show(self.shell, options, guarded("%gpumem why", api.why, name))
            case ["why", *_]:
                raise UsageError("%gpumem why: give one name, as in  %gpumem why learn")
            case words:
                raise UsageError(f"%gpumem: unknown word {words[0]!r} (%gpumem? shows what there is)")

    def _only(self, report: Report, device: str) -> Report:
        found = report.only(device)
        if not found.devices:
            have = ", ".join(each.device for each in report.devices) or "none in use"
            raise UsageError(f"%gpumem: no device {device} here; there is: {have}")
        return found
