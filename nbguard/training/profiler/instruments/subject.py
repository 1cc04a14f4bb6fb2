"""The subject of a fit, with the names of its models, and whether its beginning was missed."""

from __future__ import annotations

import types
import weakref
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.training.profiler.analysis.observations import LEARNERS, SubjectFacts
from nbguard.training.profiler.record.recorder import Recorder

_MOST = 3  # names of models that are shown


class Subject:
    """Notes the names of models; keeps none of them. One that is first called after the last loss has no part in the fit."""

    watches = "names of models"

    def __init__(self, begun: Any = None) -> None:
        """`begun`: the iterator of the first batch, where that has been recorded already."""
        self._begun = None if begun is None else weakref.ref(begun)
        self._names: dict[str, int] = {}  # losses before each was first called
        self._kind = "PyTorch loop"
        self._is_compiled = False  # one of the models at least
        self._began = self._ended = 0  # losses of the recording before the fit, and at its end
        self._missed = 0  # batches that loops had given before the profile began

    def start(self, recorder: Recorder) -> None:
        """Listen for models that are called and Learners that are fitted."""
        self._recorder = recorder
        self._began = self._ended = recorder.losses
        recorder.subscribe("model", self._model)
        recorder.subscribe("learner", self._learner)
        recorder.subscribe("loader", self._loader)

    def stop(self) -> None:
        """Note the losses that there were; nothing was patched."""
        self._ended = self._recorder.losses

    def _learner(self, learner: Any) -> None:
        self._kind = LEARNERS
        arch = attribute_of(learner, "arch")
        if type(arch) is types.FunctionType:
            self._note(arch.__name__)

    def _loader(self, iterator: Any) -> None:
        if self._begun is not None and self._begun() is iterator:
            return
        count = attribute_of(iterator, "_num_yielded")
        self._missed += count if type(count) is int else 0

    def _model(self, module: Any, _: Any) -> None:
        compiled = (attribute_of(module, "_modules") or {}).get("_orig_mod")  # by torch.compile, which puts a module around it
        self._is_compiled |= compiled is not None or attribute_of(module, "_compiled_call_impl") is not None
        self._note(type(module if compiled is None else compiled).__name__)

    def _note(self, name: str) -> None:
        if len(self._names) < _MOST:
            self._names.setdefault(name, self._recorder.losses)

    def observe(self) -> SubjectFacts:
        """Return the names of the models, and how many batches were missed."""
        trains = self._ended > self._began
        names = tuple(name for name, losses in self._names.items() if losses < self._ended or not trains)
        return SubjectFacts(self._kind, names, self._missed, self._is_compiled)
