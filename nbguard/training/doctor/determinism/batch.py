"""A batch to try a step with, either the user's, or one of the training loader's, taken so that the loader is as before."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.memory.core.advice import diagnose
from nbguard.memory.scan.devices.generators import LibraryGenerators
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.training.doctor.determinism.digests import tensors_in
from nbguard.training.doctor.determinism.kept_state import KeptState
from nbguard.training.doctor.subject import TrialSubject, fit_device


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBatch:
    """A batch as it goes into the model and the loss."""

    inputs: tuple[Any, ...] = ()
    named_inputs: dict[str, Any] | None = None  # of a model that is called by keywords, as Transformers' are
    targets: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        everything = (self.inputs, self.named_inputs or {}, self.targets)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(everything))

    @property
    def items(self) -> int | None:
        """Items of the batch: the first dimension of its first input; None without a tensor."""
        first = next(tensors_in((self.inputs, self.named_inputs or {})), None)
        return None if first is None or not first.dim() else int(first.shape[0])

    def each(self, act: Callable[[torch.Tensor], torch.Tensor]) -> TrialBatch:
        """Return the batch with `act` done to each of its tensors."""
        return TrialBatch(
            inputs=_mapped(self.inputs, act),
            named_inputs=None if self.named_inputs is None else _mapped(self.named_inputs, act),
            targets=_mapped(self.targets, act),
        )

    def cloned(self) -> TrialBatch:
        """Return a copy, so that a model may write into it."""
        return self.each(lambda tensor: tensor.detach().clone())

    def resized(self, items: int) -> TrialBatch:
        """Return a batch of another number of items: the first ones, and where there are not enough, from the start again."""
        whole = self.items or 1
        rows = [place % whole for place in range(items)]

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.shape[0] != whole:
                return tensor
            return tensor[torch.tensor(rows, device=tensor.device)]

        return self.each(cut)


def _mapped(value: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    bases = mro_of(type(value))
    if torch.Tensor in bases:
        return act(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(part, act) for part in value)
    if dict in bases:
        return {key: _mapped(part, act) for key, part in dict.items(value)}
    if tuple in bases:  # a Learner's own tuples
        return tuple(_mapped(part, act) for part in value)
    return value


def trial_batch(subject: TrialSubject) -> TrialBatch:
    """Return the batch to try a subject with, on the device where its fit would run.

    Raises:
        UndiagnosableError: there is none, or none can be made; the message says why.
    """
    batch, device = _whole_batch(subject), fit_device(subject)
    if device is None:
        return batch
    try:
        return batch.each(lambda tensor: tensor.to(device))
    except (RuntimeError, AssertionError) as error:  # out of memory; a PyTorch without such a device
        reason = in_one_line(error)
    raise UndiagnosableError(f"the batch cannot be moved to {device}, where the fit would run ({reason})")


def _whole_batch(subject: TrialSubject) -> TrialBatch:
    batch = subject.batch if subject.batch is not None else _taken(subject)
    bases = mro_of(type(batch))
    if dict in bases:
        return TrialBatch(named_inputs=dict(dict.items(batch)))
    if torch.Tensor in bases:
        return TrialBatch(inputs=(batch,))
    if tuple not in bases and list not in bases:
        raise UndiagnosableError(f"this {type(batch).__name__} is not a batch: give a tensor, or a tuple of inputs and targets")
    parts = tuple(batch)
    if not parts:
        raise UndiagnosableError("the batch is empty: give a tensor, or a tuple of inputs and targets")
    if len(parts) == 1 and dict in mro_of(type(parts[0])):
        return TrialBatch(named_inputs=dict(dict.items(parts[0])))
    count = _inputs(subject, parts)
    return TrialBatch(inputs=parts[:count], targets=parts[count:])


def _inputs(subject: TrialSubject, parts: tuple[Any, ...]) -> int:
    """Return how many parts of a batch are inputs: as its loader says, or all but the last if a loss wants that one."""
    if subject.learn is not None:
        with _kept(subject.loader):  # a Learner's loader takes an item to count them, and notes the result
            return int(getattr(subject.learn.dls, "n_inp", max(1, len(parts) - 1)))
    if subject.loss is not None:
        return max(1, len(parts) - 1)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(subject.model).forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return max(1, len(parts) - 1)
    return min(len(parts), sum(parameter.kind in kinds for parameter in parameters) - 1)


def _taken(subject: TrialSubject) -> Any:
    """Return a batch of the training loader; the loader and all generators are as before."""
    loader = subject.loader
    if loader is None:
        raise UndiagnosableError(f"a {subject.name} has no loader: give a batch, as in  " + diagnose("model", "xb").command)
    try:
        with _kept(loader):
            return loader.one_batch() if hasattr(type(loader), "one_batch") else _of_torch(loader)
    except Exception as error:  # noqa: BLE001 - whatever the user's dataset raises is the reason
        reason = in_one_line(error)
    raise UndiagnosableError(f"the training loader gives no batch ({reason}): give one, as in nbguard.diagnose(learn, batch)")


@contextlib.contextmanager
def _kept(loader: Any) -> Iterator[None]:
    """Put a loader and all generators back afterwards."""
    state, generators = KeptState([("the training loader", loader)]), LibraryGenerators()
    try:
        yield
    finally:
        state.restore()
        generators.restore()


def _of_torch(loader: Any) -> Any:
    """Return a batch of the first items of torch's loader, made here and not in a worker."""
    dataset = loader.dataset
    if not hasattr(type(dataset), "__getitem__"):
        return loader.collate_fn([item for item, _ in zip(iter(dataset), range(loader.batch_size or 1), strict=False)])
    count = min(loader.batch_size or 1, len(dataset))
    items = [dataset[place] for place in range(count)]
    return loader.collate_fn(items) if loader.batch_size else items[0]
