"""`%nbguard record`, `compare` and `apply`: what a run is made of, what differs between two, and one set again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nbguard.frontend.notebook.magics.doctor import named

if TYPE_CHECKING:
    from IPython.core.magic_arguments import MagicArgumentParser

    from nbguard.training.runs.analysis.applied import AppliedRecord
    from nbguard.training.runs.analysis.comparison import RunComparison
    from nbguard.training.runs.analysis.record import RunRecord


def add_record(options: MagicArgumentParser) -> None:
    """Add the arguments of `%nbguard record`."""
    options.add_argument(
        "name", nargs="?", metavar="LEARN", help="a Learner or a model (default: only the environment of a run)"
    )
    options.add_argument("--save", metavar="FILE", help="write the record as JSON, too")
    options.add_argument("--no-code", action="store_true", help="leave cells and changes since the commit out of the record")


def add_compare(options: MagicArgumentParser) -> None:
    """Add the arguments of `%nbguard compare`."""
    for name in ("before", "after"):
        options.add_argument(
            name,
            metavar=name.upper(),
            help="a variable with a record or a report, a JSON file, a notebook, or the id of a run of MLflow's",
        )


def add_apply(options: MagicArgumentParser) -> None:
    """Add the arguments of `%nbguard apply`."""
    options.add_argument(
        "run", metavar="RUN", help="a variable with a record or a report, a JSON file, a notebook, or an id of MLflow's"
    )
    options.add_argument(
        "name", nargs="?", metavar="LEARN", help="a Learner or a model whose settings to set (default: seeds and switches only)"
    )


def applied(shell: Any, options: argparse.Namespace) -> AppliedRecord:
    """Set what a record says, and return this and what cannot be set.

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
        save_record(record, options.save.strip("'\""))
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
