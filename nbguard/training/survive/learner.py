"""`SurviveOOM`, the callback of fastai that lets a fit go on after it ran out of memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastai.callback.core import Callback

from nbguard.memory.scan.learners import experiment_of
from nbguard.training.survive.changes import SurvivalChange
from nbguard.training.survive.guard import Guard
from nbguard.training.survive.loops import checked, models_of, parameters_of, resetter, say


def _nothing() -> None:
    """Do nothing."""


class SurviveOOM(Callback):  # type: ignore[misc]
    """Let the fits of a Learner go on where they run out of memory: `learn.fit(3, cbs=nbguard.SurviveOOM())`.

    The model's call then runs in pieces along the batch, with the same weights but for rounding; see `nbguard.survive`.
    Works in `fit`, `fine_tune`, `validate`, `get_preds` and, added to the Learner, `lr_find`. The sizes of the pieces are kept
    from one fit to the next.

    Args:
        piecewise_batch_norm: also divide models with batch norms, which then take the statistics of a piece: other weights.
        items: divide from the first batch on, into pieces of this many items.

    Attributes:
        changes: the changes and refusals so far, as `SurvivalChange`.
    """

    _guard: Guard | None = None

    def __init__(self, *, piecewise_batch_norm: bool = False, items: int | None = None) -> None:
        self.changes: list[SurvivalChange] = []
        self._sizes: dict[bool, int | None] = {True: items, False: items}
        self._options: dict[str, Any] = {"piecewise_batch_norm": piecewise_batch_norm, "items": checked(items)}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "learn" and value is None and self.learn is not None:  # removed, as it is after a fit that failed, too
            self._take_out()
            self._guard = None  # it would keep the model
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_guard", "learn")}

    def before_train(self) -> None:
        """Guard the batches that follow, and note the parameters, as some may have been thawed."""
        self._guard_of(self.learn).parameters = parameters_of((self.learn,))
        self.learn._do_one_batch = self._one_batch

    def before_validate(self) -> None:
        """Guard the batches that follow."""
        self.learn._do_one_batch = self._one_batch

    def after_train(self) -> None:
        """Guard no more batches."""
        self._take_out()

    def after_validate(self) -> None:
        """Guard no more batches."""
        self._take_out()

    def _take_out(self) -> None:
        self.learn.__dict__.pop("_do_one_batch", None)

    def _one_batch(self) -> None:
        learner = self.learn
        guard = self._guard_of(learner)
        step = experiment_of(type(learner)).step
        try:
            guard.start()
            guard.step(partial(type(learner)._do_one_batch, learner), resetter(learner, step) if step else _nothing)
            guard.is_zeroed = bool(learner.training and len(learner.yb))  # its last act
        finally:
            guard.stop()

    def _guard_of(self, learner: Any) -> Guard:
        models = models_of((learner,))
        if self._guard is None or self._guard.modules[0] is not models[0]:
            self._guard = Guard(models, say=say, **self._options)
            self._guard.log.changes, self._guard.sizes = self.changes, self._sizes
            self._guard.log.where = lambda: f"epoch {getattr(learner, 'epoch', 0) + 1}, batch {getattr(learner, 'iter', 0) + 1}"
        return self._guard
