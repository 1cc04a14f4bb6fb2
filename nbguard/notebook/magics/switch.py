"""`%nbguard`: the switches of nbguard's work around the cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.notebook.magics.command_line import guarded, show
from nbguard.notebook.magics.grammar import Grammar, Word, with_words
from nbguard.notebook.session import session_of

if TYPE_CHECKING:
    from IPython.core.magic_arguments import MagicArgumentParser

    from nbguard.reports.switches import Switches


def _add_on(options: MagicArgumentParser) -> None:
    options.add_argument(
        "--auto-clean-errors", action="store_true", help="free what a failed cell's error holds as soon as it has failed"
    )


GRAMMAR = Grammar(
    "%nbguard",
    Word(usage="", help="Say what is on.", advice=""),
    {
        "on": Word(
            usage="on",
            help="record what each cell does to the memory",
            advice="takes no name, as in  %nbguard on --auto-clean-errors",
            add=_add_on,
        ),
        "off": Word(usage="off", help="take all hooks off", advice="takes nothing more"),
        "status": Word(usage="status", help="say what is on, and who looks", advice="takes nothing more"),
        "sidebar": Word(usage="sidebar", help="show the sidebar below the cell", advice="takes nothing more"),
    },
)


@magics_class
class SwitchMagics(Magics):
    """The magic `%nbguard`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @with_words(GRAMMAR)
    def nbguard(self, line: str) -> Switches | None:
        """Switch nbguard's work around the cells on and off, say what is on, or show the sidebar.

        Loading nbguard switches two things on: a card after a cell that ran out of memory, and the sidebar's answers, which
        cost nothing while no view is open. `sidebar` shows a view below the cell. `on` switches both on again and records
        each cell's changes to the memory (`%gpumem history`; `%gpumem cells on` prints them after each cell). With
        --auto-clean-errors, memory that only the error of a failed cell holds is released at once, as by `%reset_gpu`; `%tb`
        and `%debug` go on working; not with `%pdb on`, a debugger attached or a fit running. `off` takes every hook off.
        """
        options = GRAMMAR.parse(line)
        if options is None:
            return None
        session = session_of(self.shell)
        match options.word:
            case "on":
                switches = guarded("%nbguard", session.turn_on, auto_clean_errors=options.auto_clean_errors)
            case "off":
                switches = guarded("%nbguard", session.turn_off)
            case "sidebar":
                return guarded("%nbguard sidebar", _show_sidebar)
            case _:
                switches = session.switches
        return show(self.shell, options, switches)


def _show_sidebar() -> None:
    from IPython.display import display

    from nbguard.notebook.widget import Sidebar

    display(Sidebar())  # type: ignore[no-untyped-call]
