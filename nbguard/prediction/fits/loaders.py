"""A batch of the first items of a loader's data set, made beside the loader: its own order and generator stay as they are."""

from __future__ import annotations

import copy
import random
from typing import Any

from nbguard.errors import UnpredictableError, in_one_line
from nbguard.scan.devices.generators import kept_generators


def batch_size_of(loader: Any, default: int = 1) -> int:
    """Return the items of a loader's batches: of fastai's, or of torch's own."""
    return int(getattr(loader, "bs", None) or getattr(loader, "batch_size", None) or default)


def first_batch(loader: Any) -> Any:
    """Return a batch of the first items of fastai's loader, or of PyTorch's.

    Raises:
        UnpredictableError: the loader has no items by number, or the user's data set raises an error.
    """
    data: Any = getattr(loader, "dataset", None)
    size = batch_size_of(loader)
    is_fastais = hasattr(loader, "do_item")
    if not hasattr(data, "__len__") or not (is_fastais or hasattr(loader, "collate_fn")):
        raise UnpredictableError(
            f"{type(loader).__name__} has no items by number to make a batch of: give a batch, as in predict(learn, batch)"
        )
    with kept_generators():
        try:
            return (
                _of_fastais(loader, size) if is_fastais else loader.collate_fn([data[at] for at in range(min(size, len(data)))])
            )
        except Exception as error:  # noqa: BLE001 - whatever the user's data set raises is the reason
            reason = in_one_line(error)
    raise UnpredictableError(
        f"no batch could be made of the training set's first items ({reason}): give one, as in predict(learn, batch)"
    )


def _of_fastais(loader: Any, size: int) -> Any:
    own = copy.copy(loader)
    own.__dict__["rng"] = random.Random(0)  # noqa: S311 - no secret: the loader's own generator stays as it is
    for name in ("after_item", "before_batch"):
        if name in own.__dict__:
            own.__dict__[name] = copy.deepcopy(own.__dict__[name])
    items = [own.do_item(place) for place in range(min(size, len(loader.dataset)))]
    return own.do_batch([item for item in items if item is not None])
