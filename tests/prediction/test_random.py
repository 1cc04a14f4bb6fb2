"""Random models, batches and capacities: what is said to fit fits, and what is said not to does not. A thorough run tries 200.

`python -m tests.prediction.test_random FIRST LAST` prints a line for each number.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nbguard.training.prediction.predict import predict
from tests.prediction.fits import make
from tests.prediction.test_oracle import measure
from tests.thorough import THOROUGH

MIB = 2**20
_NUMBERED = ("", "", "bf16", "fp16", "sgd", "adamw", "clip", "bf16 adamw", "accumulate")
_PICTURES = ("", "bf16", "channels_last", "channels_last bf16")
_KNOWN = ("mlp", "gpt", "vite", "tabular", "collab", "collabnn", "lora", "bert", "t5", "diffusion", "vit", "resnet18")
_DRAWS = 200 if THOROUGH else 5


@dataclass(frozen=True, slots=True)
class Draw:
    """A fit and a device for it."""

    case: str
    size: int  # items of a batch
    share: float  # of the predicted need that the device has

    @classmethod
    def of(cls, seed: int) -> Draw:
        """Return that of a number: a known model is every fifth."""
        drawn = random.Random(seed)
        if seed % 5 == 4:
            case, sizes = drawn.choice(_KNOWN), (4, 6, 8, 12, 17)
            words = _PICTURES if case in ("diffusion", "vit", "resnet18") else _NUMBERED
        else:
            case, sizes, words = f"random{seed}", (5, 16, 50, 64, 130, 256), _NUMBERED
        return cls(f"{case} {drawn.choice(words)}".strip(), drawn.choice(sizes), drawn.uniform(0.8, 1.1))


def verdict(draw: Draw, run: Callable[..., str]) -> tuple[bool | None, str]:
    """Return whether the fit is said to fit on its device, and "" or the error with which it ends there."""
    learn = make(draw.case, "cpu", draw.size)
    endless = predict(learn)
    capacity = -(-(endless.context + int((endless.peak_reserved + endless.band) * draw.share)) // MIB) * MIB
    answer = predict(learn, gpu=f"{capacity}B")
    real = measure(run, draw.case, draw.size, bytes=capacity, context=endless.context)
    print(
        f"{draw.case:30s} {draw.size:3d} items, {endless.peak_reserved // MIB:5d} MiB, {draw.share:.2f} of the need: "
        f"{answer.fits}, then {real.failed or 'it ran'}, {answer.seconds:.1f} s",
        flush=True,
    )
    return answer.fits, real.failed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(_DRAWS))
def test_what_is_said_to_fit_fits(seed: int, fake_cuda_run: Callable[..., str]) -> None:
    fits, failed = verdict(Draw.of(seed), fake_cuda_run)

    assert not (fits is True and failed)
    assert not (fits is False and not failed)


def main(first: int, last: int) -> None:
    """Print the line of each number, and what was wrong in the end."""
    from tests.prediction.compare import runner

    wrong = []
    with runner() as run:
        for seed in range(first, last):
            fits, failed = verdict(Draw.of(seed), run)
            if (fits is True and failed) or (fits is False and not failed):
                wrong.append(seed)
    print(f"{last - first} tried, wrong: {wrong or 'none'}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
