"""`FitMonitor`: the profile of a fit as a fastai callback, for scripts. The only module of profiles that imports fastai."""

from __future__ import annotations

from typing import Any

from fastai.callback.core import Callback

from nbguard.frontend.notebook.profile import import_time_once, options_of, show
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.profile import FitProfile


class FitMonitor(Callback):  # type: ignore[misc]
    """Profile each fit of a Learner: `learn.fit(3, cbs=FitMonitor())`. The report is shown when the fit ends, however.

    The profile begins once the other callbacks have prepared the fit. While another profile runs (`%%profile_fit`), it leaves
    the fit to that one.

    Args:
        show: show the report; it is in `monitor.report` anyway.
        options: as of `profile_fit`.
    """

    order = 10**6  # the others prepare the fit before it

    def __init__(self, *, show: bool = True, **options: Any) -> None:
        self.report: FitReport | None = None
        self._options = options_of(options)
        self._shows = show

    def before_fit(self) -> None:
        """Start a profile that ends with this fit."""
        if FitProfile.is_any_running():
            return
        profile = FitProfile(self._options, spent=import_time_once())
        profile.start()

        def ended(error: BaseException | None) -> None:
            self.report = profile.finish(error, key="FitMonitor")
            if self._shows:
                show(self.report)

        profile.joins(self.learn, ended)
