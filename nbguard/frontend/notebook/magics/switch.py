"""`%nbguard`: the switches of nbguard's work around the cells, and the doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.frontend.notebook.magics.command_line import guarded, show
from nbguard.frontend.notebook.magics.doctor import add_doctor, add_fix, diagnosed, fixed
from nbguard.frontend.notebook.magics.grammar import Grammar, Word, with_words
from nbguard.frontend.notebook.magics.log import add_log, logged
from nbguard.frontend.notebook.magics.runs import add_apply, add_compare, add_record, applied, compared, recorded
from nbguard.frontend.notebook.session import session_of

if TYPE_CHECKING:
    from IPython.core.magic_arguments import MagicArgumentParser

    from nbguard.memory.reports.notices.notice import Notices
    from nbguard.memory.reports.switches import Switches
    from nbguard.training.doctor.analysis.deterministic import Deterministic
    from nbguard.training.doctor.analysis.diagnosis import Diagnosis
    from nbguard.training.doctor.analysis.serving import RepairedModel
    from nbguard.training.profiler.analysis.health.nan_repair import NanRepair
    from nbguard.training.profiler.analysis.memory_log import MemoryLogState
    from nbguard.training.runs.analysis.applied import AppliedRecord
    from nbguard.training.runs.analysis.comparison import RunComparison
    from nbguard.training.runs.analysis.record import RunRecord

    Shown = (
        Switches
        | Notices
        | Diagnosis
        | Deterministic
        | RepairedModel
        | NanRepair
        | MemoryLogState
        | RunRecord
        | RunComparison
        | AppliedRecord
    )


def _add_on(options: MagicArgumentParser) -> None:
    options.add_argument(
        "--auto-clean-errors", action="store_true", help="free memory held by a failed cell's error as soon as it fails"
    )


def _add_notices(options: MagicArgumentParser) -> None:
    options.add_argument("state", nargs="?", choices=["on", "off"], metavar="on|off", help="switch notices on or off")


def _add_quiet(options: MagicArgumentParser) -> None:
    options.add_argument(
        "names", nargs="*", metavar="NAME", help="a name that may stay in memory (default: show no notice at all)"
    )


GRAMMAR = Grammar(
    "%nbguard",
    Word(usage="", help="Say what is on.", advice=""),
    {
        "on": Word(
            usage="on",
            help="record each cell's change of the memory",
            advice="takes no name, as in  %nbguard on --auto-clean-errors",
            add=_add_on,
        ),
        "off": Word(usage="off", help="take all hooks off", advice="takes nothing more"),
        "status": Word(
            usage="status", help="show what is switched on, and whether a sidebar is open", advice="takes nothing more"
        ),
        "notices": Word(
            usage="notices [on|off]",
            help="objects that were deleted, reassigned or accumulated but are still in memory",
            advice="say on or off, or nothing for the list, as in  %nbguard notices",
            add=_add_notices,
        ),
        "quiet": Word(
            usage="quiet [NAME]",
            help="show no notices about NAME, or none at all (%nbguard notices on ends it)",
            advice="give names, as in  %nbguard quiet learn",
            add=_add_quiet,
        ),
        "doctor": Word(
            usage="doctor [LEARN]",
            help="does a step repeat, does the model export, is this machine set up for it: each answer with its evidence",
            advice="name one Learner or model, or none, as in  %nbguard doctor learn",
            add=add_doctor,
        ),
        "fix": Word(
            usage="fix determinism|export|nan [LEARN]",
            help="apply or undo the doctor's advice; after a NaN, show which layers have to compute in float32",
            advice="name a fix and a Learner, as in  %nbguard fix determinism learn",
            add=add_fix,
        ),
        "record": Word(
            usage="record [LEARN]",
            help="a run's ingredients: seeds, data, split, hyper-parameters, code, versions, hardware, git",
            advice="name one Learner or model, or none, as in  %nbguard record learn --save run.json",
            add=add_record,
        ),
        "compare": Word(
            usage="compare BEFORE AFTER",
            help="differences between two runs, those that can change bits first",
            advice="name two runs, as in  %nbguard compare run.json fit",
            add=add_compare,
        ),
        "apply": Word(
            usage="apply RUN [LEARN]",
            help="set the seeds, switches and settings of a run again, and say what of its record cannot be set",
            advice="name a run, and a Learner for its settings, as in  %nbguard apply run.json learn",
            add=add_apply,
        ),
        "log": Word(
            usage="log [LOG...|off]",
            help="write the memory after each cell to CSV, TensorBoard, W&B, MLflow or a file for Prometheus",
            advice="name a log, as in  %nbguard log tensorboard:runs/memory",
            add=add_log,
        ),
        "sidebar": Word(usage="sidebar", help="show the sidebar below the cell", advice="takes nothing more"),
    },
)


@magics_class
class SwitchMagics(Magics):
    """The magic `%nbguard`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @with_words(GRAMMAR)
    def nbguard(self, line: str) -> Shown | None:
        """Switch on and off what nbguard does around the cells, say what is on, show the sidebar, or check a Learner.

        Loading nbguard switches three things on: a card after a cell that ran out of memory, a line after a cell that
        leaves something in memory that it has deleted or assigned again, and the sidebar's answers, which cost nothing while
        no view is open. `sidebar` shows a view below the cell, `notices` lists those lines and says which still hold. `on`
        switches all three on again and records each cell's changes to the memory (`%gpumem history`; `%gpumem cells on`
        prints them after each cell). With --auto-clean-errors, memory that only the error of a failed cell holds is released
        at once, as by `%reset_gpu`; `%tb` and `%debug` keep working; not with `%pdb on`, a debugger attached or a fit
        running. `off` takes every hook off.
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
            case "doctor":
                diagnosis = guarded("%nbguard doctor", diagnosed, self.shell, options)
                return show(self.shell, options, diagnosis, whole=options.all)
            case "fix":
                return show(self.shell, options, guarded("%nbguard fix", fixed, self.shell, session, options))
            case "record":
                return show(self.shell, options, guarded("%nbguard record", recorded, self.shell, options))
            case "compare":
                return show(self.shell, options, guarded("%nbguard compare", compared, self.shell, options))
            case "apply":
                return show(self.shell, options, guarded("%nbguard apply", applied, self.shell, options))
            case "log":
                return show(self.shell, options, guarded("%nbguard log", logged, session.recording, options))
            case "notices":
                if options.state is not None:
                    (session.notices.turn_on if options.state == "on" else session.notices.turn_off)()
                return show(self.shell, options, session.notices.notices)
            case "quiet":
                session.notices.be_quiet(*options.names)
                return show(self.shell, options, session.notices.notices)
            case _:
                switches = session.switches
        return show(self.shell, options, switches)


def _show_sidebar() -> None:
    from IPython.display import display

    from nbguard.frontend.notebook.widget import Sidebar

    display(Sidebar())  # type: ignore[no-untyped-call]
