"""`%nbguard`: what runs around the cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.notebook.magics.command_line import guarded, parse, parser, show, with_options
from nbguard.notebook.session import session_of

if TYPE_CHECKING:
    from nbguard.reports.switches import Switches

_OPTIONS = parser("%nbguard", "Switch on and off what runs around the cells.")
_OPTIONS.add_argument(
    "what",
    nargs="*",
    metavar="on|off|status|sidebar",
    help="record what each cell does; take all hooks off; say what is on; show the sidebar here",
)
_OPTIONS.add_argument(
    "--auto-clean-errors", action="store_true", help="with on: free what a failed cell's error holds as soon as it has failed"
)


@magics_class
class SwitchMagics(Magics):
    """The magic `%nbguard`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @with_options(_OPTIONS)
    def nbguard(self, line: str) -> Switches | None:
        """Switch on and off what runs around the cells, say what is on and who looks, or show the sidebar.

        Loading nbguard puts up two things: a card after a cell that ran out of memory, and what answers the sidebar, which
        does nothing while nobody looks. `sidebar` shows one below the cell. `on` puts both up again and records what each cell
        does to the memory (`%gpumem history`; `%gpumem cells on` says it after each cell). With --auto-clean-errors, what only
        the error of a failed cell holds is released at once, as `%reset_gpu` would; `%tb` and `%debug` go on working; not with
        `%pdb on`, a debugger attached or a fit running. `off` takes every hook off.
        """
        options = parse(_OPTIONS, line)
        session = session_of(self.shell)
        if options.auto_clean_errors and options.what != ["on"]:
            raise UsageError("%nbguard: --auto-clean-errors goes with on, as in  %nbguard on --auto-clean-errors")
        match options.what:
            case ["on"]:
                found = guarded("%nbguard", session.turn_on, auto_clean_errors=options.auto_clean_errors)
            case ["off"]:
                found = guarded("%nbguard", session.turn_off)
            case ["status"] | []:
                found = session.switches
            case ["sidebar"]:
                return guarded("%nbguard sidebar", _show_sidebar)
            case words:
                text = " ".join(words)
                raise UsageError(f"%nbguard: {text!r} is none of on, off, status, sidebar (%nbguard? shows the options)")
        return show(self.shell, options, found)


def _show_sidebar() -> None:
    from IPython.display import display

    from nbguard.notebook.widget import Sidebar

    display(Sidebar())  # type: ignore[no-untyped-call]
