"""`%gpumem predict` and `%%profile_fit --predict`: the memory of fits, by the name of a Learner, or by a cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError

if TYPE_CHECKING:
    from nbguard.training.prediction.prediction import CellPrediction, GpuComparison, Prediction


def prediction_of(
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
        size: items of a batch, instead of the loader's.
        gpu: a GPU's name or size.
        settings: of the allocator.
        largest: also the largest batch that fits.
        savings: also changes that would save memory.

    Raises:
        NbguardError: there is no such Learner, or its memory cannot be predicted; the message says why.
    """
    with _needing_torch():
        from nbguard.training.prediction.predict import predict
    return predict(_named(namespace, name), batch_size=size, gpu=gpu, settings=settings or "", largest=largest, savings=savings)


def prediction_on(
    namespace: dict[str, Any],
    name: str,
    size: int | None,
    gpus: Sequence[str],
    settings: str | None,
    *,
    largest: bool = False,
    savings: bool = False,
) -> Prediction | GpuComparison:
    """Return the prediction as `prediction_of` does, on one GPU or none, or a table of several.

    Raises:
        NbguardError: as of `prediction_of`; or savings are asked for of several GPUs.
    """
    named = _each_once(gpus)
    if len(named) < 2:
        gpu = named[0] if named else None
        return prediction_of(namespace, name, size, gpu, settings, largest=largest, savings=savings)
    if savings:
        raise NbguardError("--savings is about one GPU; name only one, as in  --gpu T4 --savings")
    with _needing_torch():
        from nbguard.training.prediction.predict import compare_gpus
    return compare_gpus(_named(namespace, name), named, batch_size=size, settings=settings or "", largest=largest)


@contextmanager
def _needing_torch() -> Iterator[None]:
    """Raise NbguardError where an import inside fails because PyTorch is not installed."""
    try:
        yield
    except ImportError:
        raise NbguardError("PyTorch is not installed here, so there is no fit to predict") from None


def _named(namespace: dict[str, Any], name: str) -> Any:
    from nbguard.memory.scan.targets import lookup, parse_target

    return lookup(parse_target(name), namespace)


def _each_once(gpus: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(gpus))


def prediction_of_cell(shell: Any, cell: str, gpus: Sequence[str]) -> CellPrediction | GpuComparison:
    """Return the prediction of the fits that a cell would start.

    Args:
        shell: IPython's, whose names are read.
        cell: the cell's text below the line of the magic.
        gpus: names or sizes; by default this kernel's device; several give a table.

    Raises:
        NbguardError: the cell starts no fit, or one that cannot be predicted; the message says why.
    """
    with _needing_torch():
        from nbguard.training.prediction.predict import predict_cell
    return predict_cell(shell.transform_cell(cell), shell.user_ns, _each_once(gpus) or [None])
