"""Predictions next to their outcomes: after a real fit on the device, the predicted and the measured peaks.

Nothing is put around the fit: that a model was trained shows in the versions of a parameter and of its gradient, which PyTorch
counts, and the peaks are the allocator's own counters, which nbguard never resets.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

from nbguard.training.prediction.fits.fit import FitSource
from nbguard.training.prediction.prediction import Prediction
from nbguard.units import format_bytes


@dataclass(slots=True, kw_only=True)
class _Expected:
    """A fit that was predicted on a live device and has not run yet."""

    parameter: weakref.ref[Any]  # the first of the model's that is trained
    version: tuple[int, ...]  # of it and of its gradient, when it was predicted
    device: int  # index
    allocated: int  # the peak counter then, in bytes
    prediction: Prediction


_expected: list[_Expected] = []
_MOST = 8
"""Fits that are waited for: a notebook that predicts many remembers the latest."""


def expect(prediction: Prediction, source: FitSource) -> None:
    """Remember a prediction for the device of this process until its fit has run."""
    if not prediction.is_live:
        return
    torch: Any = sys.modules["torch"]
    trained = [tensor for tensor in source.tensors if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad]
    if not trained:
        return
    index = trained[0].device.index if trained[0].device.type == "cuda" else torch.cuda.current_device()
    others = [each for each in _expected if (known := each.parameter()) is not None and known is not trained[0]]
    _expected[:] = others[-_MOST + 1 :]
    _expected.append(
        _Expected(
            parameter=weakref.ref(trained[0]),
            version=_version(trained[0]),
            device=index,
            allocated=int(torch.cuda.memory_stats(index).get("allocated_bytes.all.peak", 0)),
            prediction=prediction,
        )
    )


def outcomes() -> tuple[str, ...]:
    """Return a sentence for each fit that was predicted and has run since, and forget it.

    A fit that stayed below the peak of earlier cells cannot be measured by the counters: no sentence.
    """
    sentences = []
    torch: Any = sys.modules.get("torch")
    for expected in tuple(_expected):
        parameter = expected.parameter()
        if parameter is not None and _version(parameter) == expected.version:
            continue
        _expected.remove(expected)
        if parameter is None:
            continue
        stats = torch.cuda.memory_stats(expected.device)
        allocated, reserved = (int(stats.get(f"{name}_bytes.all.peak", 0)) for name in ("allocated", "reserved"))
        if allocated > expected.allocated:
            sentences.append(_sentence(expected.prediction, allocated, reserved))
    return tuple(sentences)


def _version(parameter: Any) -> tuple[int, ...]:
    """Return the version that changes when a parameter is trained, as fastai's optimizers step past its own version."""
    gradient = parameter.grad
    return (parameter._version,) if gradient is None else (parameter._version, id(gradient), gradient._version)


def _sentence(prediction: Prediction, allocated: int, reserved: int) -> str:
    pairs = ((prediction.peak_allocated, allocated), (prediction.peak_reserved, reserved))
    texts = [f"predicted {format_bytes(predicted)}, was {format_bytes(was)}" for predicted, was in pairs]
    return f"peak of the fit in tensors: {texts[0]}; reserved: {texts[1]}"
