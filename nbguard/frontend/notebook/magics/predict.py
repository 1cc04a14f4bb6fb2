"""`%gpumem predict` and `%%profile_fit --predict`: the memory of fits, by the name of what is fitted, or by a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError

if TYPE_CHECKING:
    from nbguard.training.prediction.prediction import CellPrediction, Prediction


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
        from nbguard.training.prediction.predict import predict
    except ImportError:
        raise NbguardError("PyTorch is not installed here, so there is no fit to predict") from None
    from nbguard.memory.scan.targets import lookup, parse_target

    learn = lookup(parse_target(name), namespace)
    gpu, settings = gpu and gpu.strip("'\""), (settings or "").strip("'\"")
    return predict(learn, batch_size=size, gpu=gpu, settings=settings, largest=largest, savings=savings)


def foreseen_cell(shell: Any, cell: str, gpu: str | None) -> CellPrediction:
    """Return the prediction of the fits that a cell would start.

    Args:
        shell: IPython's, whose names are read.
        cell: the cell's text below the line of the magic.
        gpu: a GPU's name or size, also in quotes; None: this kernel's device.

    Raises:
        NbguardError: the cell starts no fit, or one that cannot be foreseen; the message says why.
    """
    try:
        from nbguard.training.prediction.predict import predict_cell
    except ImportError:
        raise NbguardError("PyTorch is not installed here, so there is no fit to predict") from None
    return predict_cell(shell.transform_cell(cell), shell.user_ns, gpu and gpu.strip("'\""))
