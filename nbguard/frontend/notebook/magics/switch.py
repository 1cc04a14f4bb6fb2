"""`%nbguard`: the switches of nbguard's work around the cells, the doctor, records of runs, and the memory's log."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbguard.errors import NbguardError
from nbguard.frontend.arguments import add_two_runs, unquoted
from nbguard.frontend.grammar import Word
from nbguard.frontend.notebook.magics.command_line import MagicGrammar, documented, guarded, show
from nbguard.frontend.notebook.magics.doctor import add_doctor, add_fix, diagnosed, fixed, named
from nbguard.frontend.notebook.session import session_of

if TYPE_CHECKING:
    from nbguard.frontend.mcp.access import AssistantAccess
    from nbguard.frontend.notebook.listeners.memory_log import MemoryLogState
    from nbguard.frontend.notebook.recording import CellRecording
    from nbguard.frontend.notebook.session import Session
    from nbguard.memory.cleanup.plan.plan import Outcome
    from nbguard.training.runs.analysis.applied import AppliedRecord
    from nbguard.training.runs.analysis.comparison import RunComparison
    from nbguard.training.runs.analysis.record import RunRecord


# --- `%nbguard record`, `compare` and `apply`: what a run is made of, what differs between two, and one set again.


def add_record(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `%nbguard record`."""
    options.add_argument(
        "name", nargs="?", metavar="LEARN", help="a Learner or a model (default: only the environment of a run)"
    )
    options.add_argument("--save", metavar="FILE", type=unquoted, help="write the record as JSON, too")
    options.add_argument("--no-code", action="store_true", help="leave cells and changes since the commit out of the record")


def add_compare(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `%nbguard compare`."""
    add_two_runs(options, "a variable with a record or a report, a JSON file, a notebook, or the id of a run of MLflow's")


def add_apply(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `%nbguard apply`."""
    options.add_argument(
        "run", metavar="RUN", help="a variable with a record or a report, a JSON file, a notebook, or an id of MLflow's"
    )
    options.add_argument(
        "name", nargs="?", metavar="LEARN", help="a Learner or a model whose settings to set (default: seeds and switches only)"
    )


def applied(shell: Any, options: argparse.Namespace) -> AppliedRecord:
    """Set the facts of a record, and return these and the ones that cannot be set.

    Raises:
        NbguardError: there is no record, or the name stands for no Learner and no model.
    """
    from nbguard.training.runs.applying import apply_record

    return apply_record(_run(shell, options.run), named(shell, options.name), name=options.name or "learn")


def recorded(shell: Any, options: argparse.Namespace) -> RunRecord:
    """Return the record that a line asks for, and write it where it says.

    Raises:
        NbguardError: the name stands for no Learner and no model, or the file cannot be written.
    """
    from nbguard.training.runs.comparing import save_record
    from nbguard.training.runs.run_record import run_record

    record = run_record(named(shell, options.name), code=not options.no_code)
    if options.save:
        save_record(record, options.save)
    return record


def compared(shell: Any, options: argparse.Namespace) -> RunComparison:
    """Return the comparison that a line asks for.

    Raises:
        NbguardError: one of the two has no record.
    """
    from nbguard.training.runs.comparing import compare

    return compare(_run(shell, options.before), _run(shell, options.after))


def _run(shell: Any, text: str) -> Any:
    """Return the object of a word: a variable of this name, else the text itself, a path or an id."""
    bare = text.strip("'\"")
    return shell.user_ns[bare] if bare in shell.user_ns else bare if _is_place(bare) else named(shell, text)


def _is_place(text: str) -> bool:
    """Return whether a word is the name of a file, or an id, and no expression such as `runs[0]`."""
    return "[" not in text


# --- `%nbguard log`: the logs that the memory is written to after each cell.


_EVERY = 15.0
"""Seconds between two writings of a file for Prometheus, which is usually read every 15 to 60 seconds."""


def add_log(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `%nbguard log`."""
    options.add_argument(
        "logs",
        nargs="*",
        metavar="LOG",
        type=unquoted,
        help="csv:FILE, tensorboard:DIR, wandb, mlflow or prometheus:FILE (also several), or off (default: say what is logged)",
    )
    options.add_argument(
        "--every",
        type=float,
        default=_EVERY,
        metavar="SECONDS",
        help=f"also write files for Prometheus while cells run, at this interval in seconds ({_EVERY:g})",
    )


def logged(recording: CellRecording, options: argparse.Namespace) -> MemoryLogState:
    """Begin or end the log that a line asks for, and return its state.

    Raises:
        NbguardError: a log cannot be written to; then the earlier log goes on.
    """
    logs = tuple(options.logs)
    if not logs:
        return recording.log_state
    if "off" in logs:
        if len(logs) > 1:
            raise NbguardError("off takes nothing else, as in  %nbguard log off")
        return recording.stop_logging()
    if not options.every > 0:
        raise NbguardError("--every takes seconds above 0, as in  %nbguard log prometheus:gpu.prom --every 15")
    return recording.log(logs, options.every)


# --- `%nbguard mcp`: the person's consent that assistants look at this kernel, and to each plan that one asks for.


def add_mcp(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `%nbguard mcp`."""
    options.add_argument(
        "state",
        nargs="?",
        choices=["on", "off", "allow"],
        metavar="on|off|allow",
        help="let assistants look, end it, or carry out a plan that one asks for (default: show the plans that wait)",
    )
    options.add_argument("token", nargs="?", metavar="TOKEN", help="with allow: of the plan")


def assisted(session: Session, options: argparse.Namespace) -> AssistantAccess | Outcome:
    """Return the state of the consent after a line has changed it, or the outcome of a plan that it allows.

    Raises:
        NbguardError: no assistant can reach this kernel, or there is no such plan, or it would do something else by now.
    """
    if (options.token is not None) != (options.state == "allow"):
        raise NbguardError("allow takes the token of a plan, and on and off take nothing, as in  %nbguard mcp allow 1f2e3d4c")
    match options.state:
        case "on":
            return session.assistants.turn_on()
        case "off":
            return session.assistants.turn_off()
        case "allow":
            session.notices.expect_cleanup()
            outcome = session.assistants.allow(options.token)
            if session.memory.simulation is not None:
                session.memory.simulation.empty_cache()  # as a cleanup does on a device
            return outcome
    return session.assistants.access


if TYPE_CHECKING:
    from nbguard.frontend.notebook.listeners.memory_log import MemoryLogState
    from nbguard.memory.reports.notices.notice import Notices
    from nbguard.memory.reports.switches import Switches
    from nbguard.training.doctor.analysis.diagnosis import Diagnosis
    from nbguard.training.doctor.analysis.export import RepairedModel
    from nbguard.training.doctor.analysis.step_trace import Deterministic
    from nbguard.training.profiler.analysis.nonfinite import NanRepair
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
        | AssistantAccess
        | Outcome
    )


def _add_on(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--auto-clean-errors", action="store_true", help="free memory held by a failed cell's error as soon as it fails"
    )


def _add_notices(options: argparse.ArgumentParser) -> None:
    options.add_argument("state", nargs="?", choices=["on", "off"], metavar="on|off", help="switch notices on or off")


def _add_quiet(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "names", nargs="*", metavar="NAME", help="a name that may stay in memory (default: show no notice at all)"
    )


GRAMMAR = MagicGrammar(
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
        "mcp": Word(
            usage="mcp [on|off|allow TOKEN]",
            help="let assistants look at this kernel, and carry out a plan that one asks for",
            advice="say on, off or allow, or nothing for the plans that wait, as in  %nbguard mcp on",
            add=add_mcp,
        ),
        "sidebar": Word(usage="sidebar", help="show the sidebar below the cell", advice="takes nothing more"),
    },
)


@magics_class
class SwitchMagics(Magics):
    """The magic `%nbguard`."""

    replaced: dict[tuple[str, str], Any]

    @line_magic
    @documented(GRAMMAR)
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
            case "record" | "compare" | "apply" as word:
                call: Any = {"record": recorded, "compare": compared, "apply": applied}[word]
                return show(self.shell, options, guarded(f"%nbguard {word}", call, self.shell, options))
            case "log":
                return show(self.shell, options, guarded("%nbguard log", logged, session.recording, options))
            case "mcp":
                return show(self.shell, options, guarded("%nbguard mcp", assisted, session, options))
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
