"""The ingredients of a fit: model, optimizer and loaders of a Learner, or as given. Held only while they are read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbguard.errors import RunRecordError
from nbguard.memory.core.advice import RECORD_RUN
from nbguard.memory.scan.heap.attributes import attribute_of
from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.memory.scan.objects.learners import is_learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """The user's own objects."""

    learn: Any = None  # the Learner, if it is one
    model: Any = None  # torch module
    optimizer: Any = None  # torch's or a Learner's; None if none is known yet
    loaders: tuple[Any, ...] = ()  # the training one first

    @property
    def subject(self) -> str:
        """Return the classes of the Learner and the model."""
        names = [name_of(type(each)) for each in (self.learn, self.model) if each is not None]
        return " of ".join(names)


def ingredients_of(obj: Any, optimizer: Any = None, loaders: Sequence[Any] | Any = ()) -> Ingredients:
    """Return the ingredients of a Learner's or a model's fit.

    Raises:
        RunRecordError: it is neither.
    """
    given = tuple(loaders) if type(loaders) in (tuple, list) else () if loaders is None else (loaders,)
    if obj is None:
        return Ingredients(optimizer=optimizer, loaders=given)
    if is_learner(obj):
        own = attribute_of(attribute_of(obj, "dls"), "loaders")
        return Ingredients(
            learn=obj,
            model=attribute_of(obj, "model"),
            optimizer=optimizer if optimizer is not None else attribute_of(obj, "opt"),
            loaders=given or (tuple(own) if type(own) is list else ()),
        )
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.nn.Module not in mro_of(type(obj)):
        raise RunRecordError(
            f"this {name_of(type(obj))} is neither a Learner nor a model: name one, as in  " + RECORD_RUN.command
        )
    return Ingredients(model=obj, optimizer=optimizer, loaders=given)
