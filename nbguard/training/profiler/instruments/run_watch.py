"""The record of a run's parts, collected when its fit begins, before anything is drawn or changed by it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.runs.analysis.record import RunRecord


class RunWatch:
    """Collects one record, where it is asked for, at the beginning of a fit.

    Of a loop that is no Learner's when a model is first called; the optimizer's settings follow when that first steps.
    """

    watches = "the record of the run"

    def __init__(self, loader_of: Callable[[Any], Any], *, is_wanted: bool, has_code: bool) -> None:
        """`loader_of`: returns the loader of an iterator, None where it is not known. `has_code`: the record has cells."""
        self._is_wanted = is_wanted
        self._has_code = has_code
        self._loader_of = loader_of
        self._iterator: weakref.ref[Any] | None = None
        self._record: RunRecord | None = None
        self._has_optimizer = False

    def start(self, recorder: Recorder) -> None:
        """Wait for the fit."""
        if self._is_wanted:
            recorder.subscribe("loader", self._loader)
            recorder.subscribe("learner", self._learner)
            recorder.subscribe("model", self._model)
            recorder.subscribe("step", self._step)

    def stop(self) -> None:
        """Leave everything: nothing was patched."""

    def _learner(self, learner: Any) -> None:
        if self._record is None:
            from nbguard.training.runs.run_record import collect
            from nbguard.training.runs.settings import ingredients_of

            self._record, self._has_optimizer = collect(ingredients_of(learner), is_fit=True, has_code=self._has_code), True

    def _loader(self, iterator: Any) -> None:
        if self._iterator is None:
            self._iterator = weakref.ref(iterator)

    def _model(self, module: Any, _: Any) -> None:
        import torch

        if self._record is None and torch.nn.Module in mro_of(type(module)):
            from nbguard.training.runs.run_record import collect
            from nbguard.training.runs.settings import Ingredients

            iterator = None if self._iterator is None else self._iterator()
            loader = None if iterator is None else self._loader_of(iterator)
            loaders = () if loader is None else (loader,)
            self._record = collect(Ingredients(model=module, loaders=loaders), is_fit=True, has_code=self._has_code)

    def _step(self, optimizer: Any) -> None:
        """Add the settings of the optimizer, which nobody knew before its first step."""
        if self._has_optimizer or self._record is None:
            return
        from nbguard.training.runs.collector import FactCollector
        from nbguard.training.runs.settings import collect_optimizer

        self._has_optimizer = True
        more, record = FactCollector(), self._record
        collect_optimizer(more, optimizer)
        left = [each for each in record.missing if (each.topic, each.name) != ("hyper-parameters", "groups")]
        self._record = replace(record, facts=(*record.facts, *more.facts), missing=(*left, *more.missing))

    def observe(self) -> RunRecord | None:
        """Return the record; None where none was asked for, or no fit began."""
        return self._record
