"""`%%profile_fit`: where a fit's time and memory go.

The magic does not run the cell: that would change how errors, `await`, displayed results and `%debug` behave. The first line
becomes a line magic that starts the profile, the rest is IPython's as without it, and the profile ends with the cell.
"""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic, leading_indent
from IPython.core.magic import Magics, magics_class
from IPython.core.magic import line_cell_magic as line_and_cell_magic

from nbguard.frontend.arguments import gpu, log, number, writable
from nbguard.frontend.grammar import Word
from nbguard.frontend.notebook.display import display_bundle
from nbguard.frontend.notebook.magics.command_line import MagicGrammar, documented, guarded, keep, split
from nbguard.frontend.notebook.session import session_of

_NAME = "%%profile_fit"


def _add(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--memory", action="store_true", help="record the allocator's history of two batches, to explain the peak"
    )
    options.add_argument(
        "--ops", action="store_true", help="record four batches by torch.profiler, to name the slowest operators"
    )
    options.add_argument("--all", action="store_true", help="show all figures instead of one screen")
    options.add_argument("--last", action="store_true", help="as %%profile_fit --last: show all figures of the last profile")
    options.add_argument(
        "--tune-workers",
        action="store_true",
        help="then time the loader alone with other numbers of workers, and the storage of its files",
    )
    options.add_argument("--stop-on-nan", action="store_true", help="stop the fit at the first loss that is NaN or infinite")
    options.add_argument(
        "--survive", action="store_true", help="let a Learner's fit go on where it runs out of memory, in pieces"
    )
    steps = number("a number of steps", "--check-ranks 100")
    ranks = "compare the ranks' models bit by bit at each Nth step"
    options.add_argument("--check-ranks", type=steps, metavar="N", default=0, help=ranks)
    options.add_argument("--compare", choices=["last"], help="last: against the last run of the same cell")
    options.add_argument(
        "--trace", type=writable, metavar="FILE", default="", help="write the phases for Perfetto (ui.perfetto.dev) or Chrome"
    )
    options.add_argument(
        "--json", type=writable, metavar="FILE", default="", help="write the report as JSON, nanoseconds and bytes as integers"
    )
    saved = "save the profile; `nbguard profile FILE` shows its report again"
    options.add_argument("--save", type=writable, metavar="FILE", default="", help=saved)
    options.add_argument(
        "--predict", action="store_true", help="do not run the cell; predict the memory that its fits will take"
    )
    named = "with --predict: on this GPU, empty, instead of this kernel's; given more than once, in a table"
    options.add_argument("--gpu", type=gpu, action="append", default=[], metavar="NAME|SIZE", help=named)
    options.add_argument(
        "--log",
        action="append",
        type=log,
        metavar="LOG",
        default=[],
        help="also log the figures: csv:FILE, tensorboard:DIR, wandb, mlflow or prometheus:FILE; may be given several times",
    )
    options.add_argument("--no-code", action="store_true", help="with --log: leave cells and changes since the commit out")


GRAMMAR = MagicGrammar(
    _NAME, Word(help="Run the cell as it is, and report where a fit's time and memory go.", add=_add), {}, as_json=False
)


def _refuse_code(line: str) -> None:
    """Raise UsageError where the code to profile stands in the line itself, as with `%time`, with the cell to write."""
    words = split(line)
    try:
        _, unknown = GRAMMAR.parser().parse_known_args(words)
    except argparse.ArgumentError:
        return  # told by who reads the options
    if unknown and not unknown[0].startswith("-"):
        place = line.index(unknown[0])
        first = " ".join([_NAME, *line[:place].split()])
        raise UsageError(
            f"{_NAME}: the code goes below the magic: write  {first}  and in the next line  {line[place:].strip()}"
        )


def as_line(lines: list[str]) -> list[str]:
    """Return a cell that begins with `%%profile_fit` as one that begins with `%profile_fit`: an IPython input transformer."""
    words = lines[0].split(None, 1) if lines else []
    if not words or words[0] != _NAME or lines[0].rstrip().endswith("?"):
        return lines
    body = lines[1:]
    if "--predict" in lines[0].split():
        return lines  # a cell magic: the cell stays text
    first = next((number for number, line in enumerate(body) if line.strip()), None)
    if first is None:
        return lines
    body[first:] = leading_indent(body[first:])  # type: ignore[no-untyped-call]
    return [lines[0][1:], *cell_magic(body)]  # type: ignore[no-untyped-call]


@magics_class
class ProfileFitMagics(Magics):
    """The magic `%%profile_fit`."""

    replaced: dict[tuple[str, str], Any]

    @line_and_cell_magic
    @documented(GRAMMAR)
    def profile_fit(self, line: str, cell: str | None = None) -> None:
        """Run the cell as it is and report where the time and the memory of its fits go, and what to change first.

        With `--predict` nothing of the cell runs: the memory that its fits will take is predicted.

        A Learner's fits (`fit`, `fine_tune`, `lr_find`, `get_preds`, …) are profiled, and so is any loop over PyTorch. The
        report comes after the cell, also after an error or an interrupt: then it covers the time until then.
        """
        if cell is not None:
            if not cell.strip():
                raise UsageError(f"{_NAME}: the cell has nothing to run: write the fit below the first line")
            shell: Any = self.shell
            asked = GRAMMAR.parse(line)
            if asked is not None and asked.predict:
                from nbguard.frontend.notebook.predictions import prediction_of_cell

                prediction = guarded(_NAME, prediction_of_cell, shell, cell, asked.gpu)
                keep(shell, asked, prediction)
                display_bundle(prediction.mimebundle())
                return
            shell.run_cell(f"%profile_fit {line}\n{cell}").raise_error()
            return
        from nbguard.training.profiler.options import FitOptions

        _refuse_code(line)
        options = GRAMMAR.parse(line)
        if options is None:
            return
        if options.last:
            from nbguard.frontend.notebook.profile import last_fit, show

            show(guarded("%profile_fit --last", last_fit))
            return
        if options.predict or options.gpu:
            raise UsageError(f"{_NAME}: write --predict, and --gpu after it, in the first line of the cell with the fits")
        chosen = FitOptions(
            memory=options.memory,
            ops=options.ops,
            tune_workers=options.tune_workers,
            stop_on_nan=options.stop_on_nan,
            survive=options.survive,
            check_ranks=options.check_ranks,
            compare=options.compare is not None,
            trace=options.trace,
            json=options.json,
            save=options.save,
            logs=tuple(options.log),
            code=not options.no_code,
        )
        profile = session_of(self.shell).profile
        before = "before the cell began; none of its lines ran"
        guarded(_NAME, profile, chosen, lambda report: keep(self.shell, options, report), when=before, whole=options.all)
