"""Mistakes in the inputs of losses, found in the autograd graph next to the loss. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nbguard.profiler.analysis.report import FitFinding

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
            evidence=f"{fact.items} × {fact.items} {pairs} for {fact.items} items: their mean is the best answer for all",
            change="`output.squeeze(1)` before the loss" if fact.is_column else "`output.unsqueeze(1)` before the loss",
        )
