"""Profiles that end with the cell that they began in, or with a `with` block."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from types import TracebackType
from typing import Any

import nbguard.training.profiler.render.fit  # noqa: F401 - the view of a report, imported while the profile's clock runs
from nbguard.errors import NbguardError, ReachedError
from nbguard.memory.cells.hooks import CellEnd
from nbguard.texts import running_shell
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.options import FitOptions
from nbguard.training.profiler.profile import FitProfile
from nbguard.training.ranks.rank import current_rank

import_time = 0
"""Nanoseconds of processor time that this module and all it needs took to import; set where `nbguard` does so by itself."""


def import_time_once() -> int:
    """Return `import_time` for the first profile, and 0 for the others."""
    global import_time
    took, import_time = import_time, -1
    return max(took, 0)


class CellProfile:
    """Starts a profile now and hands its report, and the cell's code, to `show` when that ends, however it does."""

    def __init__(
        self, shell: Any, profile: FitProfile, show: Callable[[FitReport, str], None], say: Callable[[str], None]
    ) -> None:
        self._profile = profile
        self._show = show
        self._say = say
        self._end = CellEnd(shell, self._ended, profile.ends)
        try:
            profile.start()
        except BaseException:
            self._end.cancel()
            raise

    def cancel(self) -> None:
        """End the profile without a report: the extension is unloaded."""
        self._end.cancel()
        self._profile.finish()

    def _ended(self, result: Any) -> None:
        error = result.error_before_exec or result.error_in_exec
        code = result.info.raw_cell.partition("\n")[2]  # below the line of the magic, whose options may differ
        try:
            self._show(self._profile.finish(error, f"In[{result.execution_count}]", code), code)
        except KeyboardInterrupt:
            self._say("nbguard: interrupted while the report was made: there is none")
        except Exception as mistake:  # noqa: BLE001 - a mistake of ours must not cost the user more than a line
            self._say(f"nbguard: the profile has no report ({type(mistake).__name__}: {mistake}): please report it")


class profile_fit:  # noqa: N801 - used like a function
    """Profile the code of a `with` block: `with nbguard.profile_fit() as profile: …`, then `profile.report`.

    The report is shown at the end, also after an error; then it covers the time until then.

    Args:
        show: show the report at the end.
        options: those of `FitOptions`: `memory`, `ops`, `tune_workers`, `stop_on_nan`, `survive`, `compare` (all bool),
            `check_ranks` (a number of steps), `trace`, `json` and `save` (files to write), `logs` (e.g. `("csv:fits.csv",)`),
            `code` (False: the record that is logged has neither cells nor changes since the commit).
    """

    def __init__(self, *, show: bool = True, **options: Any) -> None:
        self._profile = FitProfile(options_of(options), spent=import_time_once())
        self._shows = show
        caller = sys._getframe(1)
        self._key = f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def __enter__(self) -> FitProfile:
        self._profile.start()
        return self._profile

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        report = self._profile.finish(error, key=self._key)
        if self._shows and not isinstance(error, ReachedError):  # else the fit is predicted, and has not run
            show(report)


def options_of(named: dict[str, Any]) -> FitOptions:
    """Return the options of these names; NbguardError for one that there is not."""
    known = [each.name for each in fields(FitOptions)]
    unknown = [name for name in named if name not in known]
    if unknown:
        raise NbguardError(f"{unknown[0]} is not an option of a profile; there are: {', '.join(known)}")
    options = FitOptions(**named)
    if type(options.check_ranks) is not int or options.check_ranks < 0:
        raise NbguardError(f"check_ranks={options.check_ranks!r} is not valid: give a number of steps, as in  check_ranks=100")
    return options


_last: FitReport | None = None
"""The report that was shown last."""


def last_fit() -> FitReport:
    """Return the report of the last profile of this process, with all its figures: `print(nbguard.last_fit())`.

    Raises:
        NbguardError: no fit was profiled yet.
    """
    if _last is None:
        raise NbguardError("no fit was profiled yet: write %%profile_fit above the cell of a fit")
    return _last


def last_report() -> FitReport | None:
    """Return the same as `last_fit`, or None if no fit was profiled yet."""
    return _last


def show(report: FitReport, *, whole: bool = True) -> None:
    """Show a report where the user looks: in the notebook, or else as text. Of several ranks, rank 0 shows all."""
    global _last
    _last = report
    at = current_rank()
    if at is not None and at.rank:
        return
    if running_shell() is not None:
        from nbguard.frontend.notebook.display import display_bundle

        display_bundle(report.mimebundle(whole=whole), report.display_metadata())
    else:
        print(report)  # noqa: T201 - a script has nothing else
