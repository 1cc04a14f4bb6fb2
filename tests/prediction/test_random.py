"""Random models, batches and capacities: what is said to fit fits. A thorough run tries 200."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from nbguard.prediction.predict import predict
from tests.prediction.fits import make
from tests.prediction.test_oracle import measure
from tests.thorough import THOROUGH

MIB = 2**20
_MODELS = ("mlp", "gpt", "vite", "tabular", "collab", "collabnn", "lora", "bert", "t5", "diffusion", "vit", "resnet18")
_WORDS = ("", "bf16", "sgd", "adamw", "clip")
_DRAWS = 200 if THOROUGH else 3


def _draw(seed: int) -> tuple[str, int, float]:
    """Return (case, items of a batch, share of the predicted need that the device has)."""
    drawn = random.Random(seed)
    case = f"{drawn.choice(_MODELS)} {drawn.choice(_WORDS)}".strip()
    return case, drawn.choice((4, 6, 8, 12, 17)), drawn.uniform(0.85, 1.15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(_DRAWS))
def test_what_is_said_to_fit_fits(seed: int, fake_cuda_run: Callable[..., str]) -> None:
    case, size, share = _draw(seed)
    learn = make(case, "cpu", size)
    endless = predict(learn)
    room = max(64 * MIB, int((endless.peak_reserved + endless.band) * share))
    capacity = -(-(endless.context + room) // MIB) * MIB
    answer = predict(learn, gpu=f"{capacity}B")
    real = measure(fake_cuda_run, case, size, bytes=capacity, context=endless.context)

    print(f"{case:18s} {size:3d} items, {share:.2f} of the need: {answer.fits}, then {real.failed or 'it ran'}")
    assert not (answer.fits is True and real.failed)
    assert not (answer.fits is False and not real.failed)
