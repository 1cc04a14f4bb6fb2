"""Guards around the training loops of libraries, and `survive`, for loops of one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import TracebackType
from typing import Any
from weakref import ref

from nbguard.errors import NbguardError, NoTorchError
from nbguard.libraries import DEFAULT_EXPERIMENT, StepMethod, model_parts, steps
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.memory.scan.learners import experiment_of
from nbguard.texts import printable
from nbguard.training.survive.changes import SurvivalChange
from nbguard.training.survive.guard import Guard, is_out_of_memory
from nbguard.training.survive.ranks import without_ddp


class survive:  # noqa: N801 - used like a function
    """Keep a training going where it runs out of memory: `with nbguard.survive(model, optimizer): …`.

    The model's call then runs in pieces along the batch, whose activations are computed again in the backward pass; the loss,
    the optimizer and the metrics see the whole batch, and the weights are the same but for rounding. Where room can be made by
    moving tensors to host memory and back, that comes first. Nothing changes before memory runs out. In a loop of one's own an
    error in the loss itself needs the step as a function: `@nbguard.survive(model, optimizer)` above it.

    Args:
        parts: models, optimizers and gradient scalers; a Learner, or a Trainer of Transformers; a LightningModule, before
            `trainer.fit`.
        piecewise_batch_norm: also divide models with batch norms, which then take the statistics of a piece: other weights.
        items: divide from the first batch on, into pieces of this many items.

    Attributes:
        changes: the changes and refusals so far, as `SurvivalChange`.

    Raises:
        NbguardError: there is no model among the parts.
        NoTorchError: PyTorch is not imported yet.
    """

    def __init__(self, *parts: Any, piecewise_batch_norm: bool = False, items: int | None = None) -> None:
        if "torch" not in sys.modules:
            raise NoTorchError
        self.changes: list[SurvivalChange] = []
        self._parts = [ref(part) for part in parts if _is_training(part)]  # a name of this keeps no model on a device
        self._options: dict[str, Any] = {"piecewise_batch_norm": piecewise_batch_norm, "items": checked(items)}
        self._guard: Guard | None = None
        self._found: tuple[dict[bool, int | None], int] = {}, 0  # sizes of pieces and passes of earlier calls
        self._undo: list[Callable[[], None]] = []
        if not models_of(parts):
            raise NbguardError("there is no model to guard: give one, or a Learner or a Trainer")

    def __enter__(self) -> survive:
        parts = [part for each in self._parts if (part := each()) is not None]
        models = models_of(parts)
        if not models:
            raise NbguardError(
                "the model that was given is gone, as no name holds it: give it again, as in  nbguard.survive(model)"
            )
        try:
            self._put(models, parts)
        except BaseException:  # Ctrl-C, too
            self._take_out(None)
            raise
        return self

    def _put(self, models: list[Any], parts: list[Any]) -> None:
        """Put the guard around the models, and around the steps of the parts and of the libraries that are loaded."""
        experiments = [(part, experiment_of(type(part)).step) for part in parts]
        in_steps = [(part, step) for part, step in experiments if step is not None]
        self._guard = guard = Guard(models, redoes=not in_steps, say=say, **self._options)
        guard.log.changes = self.changes
        sizes, guard.passes = self._found
        guard.sizes |= sizes
        guard.parameters = parameters_of(parts)
        guard.scalers = [part for part in parts if _is_scaler(part)]
        guard.start()
        others = [step for step in steps() if step.module in sys.modules]
        owners = [(getattr(sys.modules[step.module], step.owner), step) for step in others]
        for owner, step in (*in_steps, *owners):
            self._undo.append(_undo_of(owner, step))
            _put_step(guard, owner, step)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failure = error if error is not None and is_out_of_memory(error) else None
        try:
            self._take_out(failure)
        except KeyboardInterrupt:
            self._take_out(failure)
            raise

    def _take_out(self, failure: BaseException | None) -> None:
        """Take everything out again; it may be called again after an interrupt."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        if self._guard is not None:
            self._found = self._guard.sizes, self._guard.passes
            self._guard.stop(failure)
        self._guard = None

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that is run again where it ran out of memory before its first backward pass was complete."""

        @wraps(step)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._guard is not None:
                return self._guard.step(lambda: step(*args, **kwargs))
            with self:
                guard: Any = self._guard
                return guard.step(lambda: step(*args, **kwargs))

        return guarded


def _is_scaler(part: Any) -> bool:
    return hasattr(type(part), "unscale_") and hasattr(part, "_growth_tracker")


def _is_training(part: Any) -> bool:
    """Say whether an object can be a part of a training: such objects can be referred to weakly."""
    return type(part).__weakrefoffset__ != 0


def checked(items: int | None) -> int | None:
    """Return the items of a piece; NbguardError where they are no number of items."""
    if items is not None and (type(items) is not int or items < 1):
        raise NbguardError(f"items={items!r} is not valid: give the items of a piece, as in  items=16")
    return items


def say(text: str) -> None:
    """Show a line in the output of the cell or script."""
    print(printable(text), flush=True)  # noqa: T201 - it stands among the lines of the fit's own log


def models_of(parts: Iterable[Any]) -> list[Any]:
    """Return the modules among the parts, or in them, whose outputs lead with the batch."""
    torch: Any = sys.modules["torch"]
    found = []
    for part in parts:
        experiment = experiment_of(type(part))
        is_experiment = experiment is not DEFAULT_EXPERIMENT
        attribute = next((each.attribute for each in experiment.parts if each.kind == "model"), "")
        model = getattr(part, attribute, None) if is_experiment else part
        if isinstance(model, torch.nn.Module):
            found += _called(model)
    return found


def _called(model: Any) -> list[Any]:
    """Return the parts of a model that are called with the batch."""
    if hasattr(model, "get_base_model"):  # of peft: an adapter around another model
        model = model.get_base_model()
    known, classes = model_parts(), [name_of(cls) for cls in type(model).__mro__]
    attribute = next((known[name] for name in classes if name in known), "")
    if attribute == "*":
        has_forward = type(model).forward is not sys.modules["torch"].nn.Module.forward
        children = [child for child in model.children() if next(child.parameters(), None) is not None]
        return [model] * has_forward + children
    return [getattr(model, attribute, model) if attribute else without_ddp(model)]


def parameters_of(parts: Iterable[Any]) -> list[Any]:
    """Return the tensors, each once, whose gradients the backward passes of these parts change."""
    torch: Any = sys.modules["torch"]
    found: dict[int, Any] = {}
    for part in parts:
        experiment = experiment_of(type(part))
        inside = [part, *(getattr(part, each.attribute, None) for each in experiment.parts)]
        for each in inside:
            if isinstance(each, torch.nn.Module):
                found |= {id(parameter): parameter for parameter in each.parameters()}
            for group in getattr(each, "param_groups", ()) if not isinstance(each, torch.nn.Module) else ():
                found |= {id(parameter): parameter for parameter in group["params"]}
    return list(found.values())


def _put_step(guard: Guard, owner: Any, step: StepMethod) -> None:
    """Guard the steps of an object, or of a class."""
    original = getattr(owner, step.name)

    @wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return guard.step(partial(original, *args, **kwargs), resetter(owner, step))

    setattr(owner, step.name, guarded)


def _undo_of(owner: Any, step: StepMethod) -> Callable[[], None]:
    """Return a function that restores the present step of an object, or of a class; it may be called again."""
    former = vars(owner).get(step.name)

    def undo() -> None:
        if former is not None:
            setattr(owner, step.name, former)
        elif step.name in vars(owner):
            delattr(owner, step.name)

    return undo


def resetter(owner: Any, step: StepMethod) -> Callable[[], None]:
    """Return a function that makes an object forget the results of a step, and have the batch as it is now."""
    given = [(name, getattr(owner, name, None)) for name in step.given]

    def reset() -> None:
        for name in step.computed:
            setattr(owner, name, None)
        for name, value in given:
            setattr(owner, name, value)

    return reset
