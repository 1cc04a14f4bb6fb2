"""Changes to a model, such as checkpoints, biases that a norm takes away, a loss in parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbguard.training.prediction.savings.change import Change

_BIASED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PARTS = 8


def of_model(path: str, model: Any, after: str = "") -> Iterator[Change]:
    """Yield the changes to a model.

    Args:
        path: expression that leads to the model.
        model: the user's, which is read.
        after: a line to run after parameters are gone.
    """
    if blocks := _repeated(model):
        kind, count = blocks
        yield Change(
            name=f"checkpoints of {count} {kind}",
            code="from functools import partial\n"
            "from torch.utils.checkpoint import checkpoint\n"
            f'for block in [each for each in {path}.modules() if type(each).__name__ == "{kind}"]:\n'
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
            cost="about a third slower, because these blocks compute twice",
            kind="checkpoints",
        )
    if kinds := ", ".join(sorted({f"nn.{type(layer).__name__}" for layer in _before_norms(model)})):
        yield Change(
            name="no bias before a batch norm",
            code="from torch import nn\n"
            f"for block in [each for each in {path}.modules() if isinstance(each, nn.Sequential)]:\n"
            "    for layer, norm in zip(block, list(block)[1:]):\n"
            f"        if type(layer) in ({kinds},) and layer.bias is not None and hasattr(norm, 'running_mean'):\n"
            "            norm.running_mean -= layer.bias.detach()\n"
            f"            layer.bias = None{after}",
            cost="nothing; the norm removes the bias anyway",
        )


def loss_in_parts(path: str, loss: Any) -> Iterator[Change]:
    """Yield the change of a cross entropy to one that is computed in parts, if the mean of parts is the whole's.

    Args:
        path: expression that leads to the loss, a module of PyTorch's.
        loss: the user's, which is read.
    """
    if type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean" and loss.weight is None:
        yield Change(
            name=f"the loss in {_PARTS} parts",
            code="from torch.utils.checkpoint import checkpoint\n"
            f"whole_loss = {path}.forward\n"
            "def loss_in_parts(out, target):\n"
            f"    parts = zip(out.chunk({_PARTS}), target.chunk({_PARTS}))\n"
            "    return sum(checkpoint(whole_loss, *part, use_reentrant=False) * len(part[0]) for part in parts) / len(out)\n"
            f"{path}.forward = loss_in_parts",
            cost="a little slower, because the loss computes twice; correct if no target is ignored",
        )


def _before_norms(model: Any) -> Iterator[Any]:
    """Yield the layers with a bias that stand before a batch norm in a sequence."""
    for block in model.modules():
        if isinstance(block, nn.Sequential):
            for layer, norm in zip(block, list(block)[1:], strict=False):
                if type(layer) in _BIASED and layer.bias is not None and getattr(norm, "running_mean", None) is not None:
                    yield layer


def _repeated(model: Any) -> tuple[str, int] | None:
    """Return the class of the modules that make up most of a model in equal blocks, and their number."""
    counts, sizes = Counter[str](), Counter[str]()
    for module in model.modules():
        name = type(module).__name__
        if next(module.children(), None) is None or type(module).__module__ == "torch.nn.modules.container":
            continue
        counts[name] += 1
        sizes[name] += sum(parameter.numel() for parameter in module.parameters())
    repeated = [name for name, count in counts.items() if count > 1]
    if not repeated:
        return None
    best = max(repeated, key=lambda name: (sizes[name], -counts[name]))
    return best, counts[best]
