"""`%gpumem predict`: the memory of the next fit of a Learner, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError

if TYPE_CHECKING:
    from nbguard.prediction.prediction import Prediction


def foreseen(
    namespace: dict[str, Any],
    name: str,
    size: int | None,
    gpu: str | None,
    settings: str | None,
    *,
    largest: bool = False,
    savings: bool = False,
) -> Prediction:
    """Return the prediction for the Learner of that name.

    Args:
        namespace: the user's names.
        name: of the Learner, or an expression such as `runs[0]`.
        size: items of a batch; None: the loader's.
        gpu: a GPU's name or size, also in quotes.
        settings: of the allocator, also in quotes.
        largest: also the largest batch that fits.
        savings: also what would save memory.

    Raises:
        NbguardError: there is no such Learner, or its memory cannot be foreseen; the message says why.
    """
    try:
        from nbguard.prediction.predict import predict
    except ImportError:
        raise NbguardError("PyTorch is not installed here: there is no fit to foresee") from None
    from nbguard.scan.targets import lookup, parse_target

    learn = lookup(parse_target(name), namespace)
    gpu, settings = gpu and gpu.strip("'\""), (settings or "").strip("'\"")
    return predict(learn, batch_size=size, gpu=gpu, settings=settings, largest=largest, savings=savings)
