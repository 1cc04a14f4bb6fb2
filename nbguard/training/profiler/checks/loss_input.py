"""Mistakes in the inputs of losses, their values and shapes, found in the autograd graph next to the loss."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nbguard.memory.scan.heap.kinds import name_of
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.recorder import Recorder

Squashing = Literal["softmax", "sigmoid", ""]


@dataclass(frozen=True, slots=True)
class SquashedLogits:
    """A loss that was given something else than the logits, or log-probabilities, that it takes."""

    loss: str  # function of torch.nn.functional, e.g. "cross_entropy"
    by: Squashing  # the last operation before the loss; "": a layer's own output, where log-probabilities belong
    layer: str = ""  # module that makes it, e.g. "5 (Sigmoid)"; "": none was found


@dataclass(frozen=True, slots=True)
class BroadcastLoss:
    """Predictions and targets of different shapes, which the loss has stretched to all pairs of items."""

    items: int  # of the batch: the loss has items × items terms
    is_column: bool  # the predictions are (items, 1, *rest) and the targets (items, *rest); False: the other way round
    rest: tuple[int, ...] = ()  # shape of an item's map; (): it is one number


@dataclass(frozen=True, slots=True)
class LossInputFacts:
    """The inputs of the first losses of a fit that are no inputs for them."""

    squashed: tuple[SquashedLogits, ...] = ()
    broadcast: tuple[BroadcastLoss, ...] = ()


def loss_input_findings(facts: LossInputFacts) -> tuple[FitFinding, ...]:
    """Return the mistakes, those that squash first."""
    return (*map(_squashed, facts.squashed), *_broadcast(facts))


_MODULES = {
    "cross_entropy": "nn.CrossEntropyLoss",
    "binary_cross_entropy_with_logits": "nn.BCEWithLogitsLoss",
    "nll_loss": "nn.NLLLoss",
}


def _squashed(fact: SquashedLogits) -> FitFinding:
    loss, layer = f"`{_MODULES[fact.loss]}`", f", here `{fact.layer}`," if fact.layer else ""
    if fact.loss == "nll_loss" and fact.by:
        what = f"{loss} expects log-probabilities, but the softmax{layer} gives probabilities"
        evidence = (
            "the loss is minus the probability of the right class, so it lies between -1 and 0 and its gradients are small"
        )
        change = "remove the softmax and use `nn.CrossEntropyLoss()`"
    elif fact.loss == "nll_loss":
        what = f"{loss} expects log-probabilities, but gets a layer's raw output"
        evidence = "the loss is minus the output of the right class, so it falls without end"
        change = "`nn.CrossEntropyLoss()`, which takes raw outputs"
    else:
        what = f"a {fact.by}{layer} comes before {loss}, which already applies one"
        evidence = "the second one gets values between 0 and 1 and makes them nearly equal, so the loss cannot fall below "
        evidence += "0.31 for two classes, 1.46 for ten" if fact.loss == "cross_entropy" else "0.31 for 1, 0.69 for 0"
        change = f"train on the outputs before the {fact.by}, and apply it to predictions only"
        if fact.by == "sigmoid" and fact.loss != "cross_entropy":
            change += "; or `nn.BCELoss()`"
    return FitFinding(kind="loss input", severity="problem", what=what, evidence=evidence, change=change)


def _broadcast(facts: LossInputFacts) -> Iterator[FitFinding]:
    for fact in facts.broadcast[:1]:
        pairs = "pairs" if fact.rest else "terms"
        column, row = (fact.items, 1, *fact.rest), (fact.items, *fact.rest)
        outputs, targets = (column, row) if fact.is_column else (row, column)
        yield FitFinding(
            kind="loss input",
            severity="problem",
            what=f"the loss compares every prediction with every target because the shapes {outputs} and {targets} broadcast",
            evidence=f"{fact.items} × {fact.items} {pairs} for {fact.items} items: the mean target for all fits best",
            change="`output.squeeze(1)` before the loss" if fact.is_column else "`output.unsqueeze(1)` before the loss",
        )


_LOSSES = 4
"""Losses of a fit that are examined: several, as a fit may have several models."""
_NODES = 48
"""Operations before a loss that are examined: the terms of one that has several."""
_VIEWS = frozenset(
    ["Expand", "Permute", "Reshape", "Select", "Slice", "Squeeze", "T", "Transpose", "Unsqueeze", "UnsafeView", "View"]
)
_SHAPED = _VIEWS | {"Alias", "Clone", "ToCopy"}
"""Operations that change no value, by the name of their backward function without its number."""
_TERMS = frozenset(
    ["Abs", "Add", "Cat", "Div", "Index", "MaskedFill", "Mean", "Mul", "Neg", "Pow", "Sqrt", "Stack", "Sub", "Sum"]
)
_SUMMED = _SHAPED | _TERMS | {"Where"}
"""Operations that make a loss of its terms."""
_SQUASHING: dict[str, Squashing] = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
_NLL = frozenset(("NllLoss", "NllLoss2D"))
_LAYERS = frozenset(("Addmm", "Mm", "Linear", "Convolution", "ConvolutionOverrideable"))
_ELEMENTWISE = frozenset(("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "Pow", "Abs", "Mul"))
"""Losses of pairs, and the operations on a difference in hand-written ones."""


class LossInputWatch:
    """Looks at the last few operations before each of the first losses: names and shapes, no values."""

    watches = "inputs of losses"
    name = "loss_input"
    facts = LossInputFacts

    def __init__(self) -> None:
        self._seen = 0
        self._model: weakref.ref[Any] | None = None
        self._squashed: dict[SquashedLogits, None] = {}
        self._broadcast_loss: dict[BroadcastLoss, None] = {}

    def start(self, recorder: Recorder) -> None:
        """Wait for the first losses."""
        self._recorder = recorder
        recorder.subscribe("forward", self._forward)
        recorder.subscribe("loss", self._loss)

    def stop(self) -> None:
        """Leave everything: nothing was patched, and no graph is held."""

    def observe(self) -> LossInputFacts:
        """Return the mistakes that were seen."""
        return LossInputFacts(tuple(self._squashed), tuple(self._broadcast_loss))

    @staticmethod
    def diagnose(facts: LossInputFacts, fit: FitFigures) -> Iterable[FitFinding]:  # noqa: ARG004 - of the protocol
        """Return the mistakes, those that squash first."""
        return loss_input_findings(facts)

    def _forward(self, module: Any, _: Any) -> None:
        self._model = weakref.ref(module)

    def _loss(self, tensors: Any) -> None:
        self._seen += 1
        if self._seen >= _LOSSES:
            self._recorder.unsubscribe("forward", self._forward)
            self._recorder.unsubscribe("loss", self._loss)
        for tensor in tensors if type(tensors) in (tuple, list) else (tensors,):
            for node in _nodes(_maker_of(tensor)):
                self._look(node)

    def _look(self, node: Any) -> None:
        kind = _kind(node)
        if kind in _NLL or kind in ("LogSoftmax", "BinaryCrossEntropyWithLogits"):
            self._look_at_logits(kind, node)
        elif kind in _ELEMENTWISE:
            found = _broadcast_loss(node)
            if found is not None:
                self._broadcast_loss[found] = None

    def _look_at_logits(self, kind: str, node: Any) -> None:
        before = _kind(_valued(_first(node)))
        by = _SQUASHING.get(before, "")
        if kind in _NLL:
            loss = "nll_loss"
            is_wrong = by == "softmax" or before in _LAYERS
        else:
            loss, is_wrong = "cross_entropy" if kind == "LogSoftmax" else "binary_cross_entropy_with_logits", bool(by)
        if is_wrong:
            self._squashed[SquashedLogits(loss, by, self._layer(by) if by else "")] = None

    def _layer(self, by: Squashing) -> str:
        """Return the last module of the model, if it is the one of torch's that does this."""
        model = None if self._model is None else self._model()
        kinds = {"softmax": ("Softmax", "Softmax2d"), "sigmoid": ("Sigmoid",)}[by]
        if model is None or not hasattr(type(model), "named_modules"):
            return ""
        name, last = [(name, layer) for name, layer in model.named_modules() if not layer._modules][-1]
        kind = name_of(type(last))
        return "" if kind not in kinds else f"{name} ({kind})" if name else kind


def _maker_of(tensor: Any) -> Any:
    """Return the node that made a tensor; None of one that nothing made, or of no tensor."""
    torch: Any = sys.modules["torch"]
    if not issubclass(type(tensor), torch.Tensor):
        return None
    with torch._C.DisableTorchFunction():
        return tensor.grad_fn


def _kind(node: Any) -> str:
    """Return the name of an operation, e.g. `Softmax` of `SoftmaxBackward0`."""
    return "" if node is None else name_of(type(node)).partition("Backward")[0]


def _first(node: Any) -> Any:
    """Return the node of the first input, or of the first that has one."""
    return next((before for before, _ in node.next_functions if before is not None), None)


def _valued(node: Any) -> Any:
    """Return the first node from here on that makes new values."""
    for _ in range(_NODES):
        if _kind(node) not in _SHAPED:
            break
        node = _first(node)
    return node


def _nodes(node: Any) -> Iterator[Any]:
    """Yield the operations before a loss, the nearest first, as far as they only add up its terms."""
    waiting, seen = [node], 0
    while waiting and seen < _NODES:
        node = waiting.pop(0)
        if node is None:
            continue
        seen += 1
        yield node
        kind = _kind(node)
        if kind in _SUMMED or kind in _NLL:
            waiting += [before for before, _ in node.next_functions]


def _shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the result of an operation; None where it has several, or torch does not tell."""
    metadata: Any = getattr(node, "_input_metadata", ())
    return tuple(metadata[0].shape) if len(metadata) == 1 else None


def _broadcast_loss(node: Any) -> BroadcastLoss | None:
    """Return the inputs that a loss of pairs stretched: numbers or maps of a batch that came from a layer, to all pairs.

    Whoever stretches on purpose does it by `view`, `unsqueeze` or `[:, None]`, or has gradients on both sides.
    """
    stretched = _first(node)
    is_square = all(before is stretched for before, _ in node.next_functions)
    if _kind(stretched) not in ("Sub", "Expand") or (_kind(node) == "Mul" and not is_square):
        return None
    if _kind(stretched) == "Sub":
        sides = [before for before, _ in stretched.next_functions if before is not None]
        if len(sides) != 1:
            return None
        operand = sides[0]
        if _kind(operand) == "Expand":
            stretched, operand = operand, _first(operand)
    else:
        operand = _first(stretched)
    while _kind(operand) in _SHAPED - _VIEWS:
        operand = _first(operand)
    after, before = _shape(stretched), _shape(operand)
    if after is None or before is None or len(after) < 2 or after[0] != after[1] or after[0] < 2:
        return None
    items, *rest = after[1:]
    if before == (items, 1, *rest) and _kind(operand) not in _VIEWS:
        return BroadcastLoss(items, is_column=True, rest=tuple(rest))
    if before == (items, *rest) and len(rest) != 1:  # of vectors, all distances may be meant
        return BroadcastLoss(items, is_column=False, rest=tuple(rest))
    return None
