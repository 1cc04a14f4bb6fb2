"""Changes that would save memory in a fit, each tried in a trace of its own, by the line that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from nbguard.errors import UnpredictableError
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.training.prediction.fits.learner_fit import LearnerSource
from nbguard.training.prediction.fits.loop_fit import LoopSource
from nbguard.training.prediction.fits.step_fit import StepSource
from nbguard.training.prediction.largest_batch import largest_batch
from nbguard.training.prediction.prediction import Saving
from nbguard.training.prediction.savings.change import Change
from nbguard.training.prediction.savings.of_learner import of_learner
from nbguard.training.prediction.savings.of_model import of_model
from nbguard.training.prediction.savings.of_step import of_step
from nbguard.training.prediction.trace import FitTrace, FitTracer, OutOfTimeError

_EXPANDABLE = "expandable_segments:True"


def savings(
    tracer: FitTracer,
    batch_size: int | None,
    endless: FitTrace,
    version: tuple[int, int],
    is_wanted: Callable[[Change], bool] = lambda _: True,
    *,
    largest: bool = False,
) -> tuple[Saving, ...]:
    """Return the changes that could be tried, with the peaks of the fit after each; the one that saves most comes first.

    Args:
        tracer: traces the fit.
        batch_size: items of a batch; the loader's if None.
        endless: the trace of the fit as it is.
        version: of torch, (major, minor), whose settings of the allocator are read.
        is_wanted: says whether to try a change.
        largest: also search for the largest batch after each.
    """
    size, tried = endless.sizes[0], list[Saving]()
    for change in _changes(tracer, size, endless):
        if not is_wanted(change):
            continue
        own = replace(tracer, code="\n".join(filter(None, (tracer.code, change.code))), is_last_optional=True)
        if change.conf:
            own = replace(own, settings=AllocatorSettings.parse(_joined(tracer.settings.conf(), change.conf), version))
        after = batch_size if change.parts == 1 else size // change.parts
        try:
            trace = own.endless(after)
            fits = own.answer(after, trace)[0]
        except OutOfTimeError:
            break
        except UnpredictableError:
            continue  # this model cannot be changed so
        tried.append(
            Saving(
                name=change.name,
                kind=change.kind,
                peak_allocated=trace.peak_allocated,
                peak_reserved=trace.peak_reserved,
                saved=endless.peak_reserved - trace.peak_reserved,
                batch_size=size // change.parts,
                code=change.code,
                settings=change.conf,
                cost=change.cost,
                fits=fits,
                largest=largest_batch(own, trace) if largest else None,
            )
        )
    return tuple(sorted(tried, key=lambda saving: -saving.saved))


def _changes(tracer: FitTracer, size: int, endless: FitTrace) -> Iterator[Change]:
    """Yield the changes that this fit leaves room for."""
    source, convolves = tracer.source, bool(endless.convolutions)
    if isinstance(source, LearnerSource):
        yield from of_learner(source, tracer.gpu, size, convolves=convolves)
        yield from of_model("learn.model", source.learn.model, after="\nlearn.opt = None")
    elif isinstance(source, (StepSource, LoopSource)):
        yield from of_step(source, tracer.gpu, size, convolves=convolves)
    if not isinstance(source, LearnerSource):
        for name, model in source.modules:
            yield from of_model(name, model)
    if "expandable_segments" not in tracer.settings.conf():
        yield Change(name="expandable segments", conf=_EXPANDABLE, cost="nothing; it is set before PyTorch is imported")


def _joined(settings: str, more: str) -> str:
    return f"{settings},{more}" if settings else more
