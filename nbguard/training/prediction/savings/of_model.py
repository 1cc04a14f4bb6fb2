"""Changes to a model (checkpoints, biases that a norm takes away, a loss in parts) and to a fastai Learner."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from nbguard.training.prediction.fits.learner_fit import PRECISIONS, LearnerSource
from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.prediction import ChangeKind

# --- A change to a fit that may save memory.


_PARTS_of_change = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that can be tried."""

    name: str
    cost: str  # its cost, in words
    code: str = ""  # lines that change the Learner, by the name `learn`, or a step's models and optimizers, by theirs
    parts: int = 1  # into how many batches one is cut
    conf: str = ""  # setting of the allocator
    kind: ChangeKind = ""  # of a change that others ask for


def added_up(
    size: int, models: Iterable[nn.Module], code: Callable[[int], str], more: Callable[[int], str]
) -> Iterator[Change]:
    """Yield the changes to batches of a half and a quarter of the items whose gradients are added up.

    Args:
        size: items of a batch as it is.
        models: the user's, which are read.
        code: lines that let the optimizer wait, by the number of parts of a batch.
        more: further lines, likewise.
    """
    has_norm = any("BatchNorm" in type(each).__name__ for model in models for each in model.modules())
    norm = "; batch norm sees fewer items" if has_norm else ""
    for parts in _PARTS_of_change:
        if size % parts == 0:
            yield Change(
                name=f"gradients of {parts} batches of {size // parts} added up",
                code=code(parts),
                parts=parts,
                kind="accumulation",
                cost=f"a little slower{norm}; {more(parts)}",
            )


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


# --- Changes to a fastai Learner, on precision, batches, optimizer, gradients, loss, memory format.


FULL_PRECISION = (8, 0)
"""The first architecture whose GPUs multiply bfloat16 at full speed."""
_FUSED = ("Adam", "AdamW")


def of_learner(source: LearnerSource, gpu: Gpu, size: int, *, convolves: bool) -> Iterator[Change]:
    """Yield the changes that a Learner leaves room for.

    Args:
        source: with the user's Learner, which is read.
        gpu: decides about the precision.
        size: items of a batch.
        convolves: the model has convolutions.
    """
    learn = source.learn
    if not source.precision and not _has_callback(learn, "MixedPrecision"):
        if gpu.architecture >= FULL_PRECISION:
            yield Change(kind="precision", name="bfloat16", code=PRECISIONS["bf16"], cost="faster; sums keep fewer digits")
        yield Change(
            kind="precision",
            name="float16",
            code=PRECISIONS["fp16"],
            cost="faster; gradients are scaled, and an occasional step is skipped",
        )
    if not _has_callback(learn, "GradientAccumulation"):
        code = f"from fastai.callback.training import GradientAccumulation\nlearn.add_cb(GradientAccumulation(n_acc={size}))"
        yield from added_up(size, [learn.model], lambda _: code, lambda parts: f"make the DataLoaders with bs={size // parts}")
    if _can_freeze(learn):
        yield Change(
            kind="frozen",
            name="only the head trained",
            code="learn.freeze()",
            cost="the body keeps its weights, as in transfer learning; learn.unfreeze() lets it learn again",
        )
    yield from _of_optimizer(learn)
    yield from loss_in_parts("learn.loss_func.func", getattr(learn.loss_func, "func", None))
    if convolves and not _has_callback(learn, "ChannelsLast"):
        yield Change(
            name="channels last",
            code="from fastai.callback.channelslast import ChannelsLast\nlearn.add_cb(ChannelsLast())",
            cost="faster in half precision on GPUs with tensor cores",
        )


def _of_optimizer(learn: Any) -> Iterator[Change]:
    optimizer, is_torchs = _optimizer(learn)
    if optimizer != "SGD":
        yield Change(
            name="SGD with momentum",
            code="from functools import partial\n"
            "from fastai.optimizer import SGD\n"
            "learn.opt_func = partial(SGD, mom=0.9)\n"
            "learn.create_opt()",
            cost="it is another optimizer and needs another learning rate",
        )
    if is_torchs and optimizer in _FUSED and not _is_fused(learn):
        yield Change(
            name=f"a fused {optimizer}",
            code="from functools import partial\n"
            "import torch\n"
            "from fastai.optimizer import OptimWrapper\n"
            f"learn.opt_func = partial(OptimWrapper, opt=partial(torch.optim.{optimizer}, fused=True))\n"
            "learn.opt = None",
            cost="nothing; its step is one kernel, and faster",
        )
    if not is_torchs and getattr(learn.opt_func, "__name__", "") != "letting_gradients_go":
        yield Change(
            name="gradients freed after the step",
            code="make_opt = learn.opt_func\n"
            "def letting_gradients_go(*args, **kwargs):\n"
            "    opt = make_opt(*args, **kwargs)\n"
            '    opt.zero_grad = lambda: [setattr(parameter, "grad", None) for parameter, *_ in opt.all_params()]\n'
            "    return opt\n"
            "learn.opt_func = letting_gradients_go\n"
            "learn.opt = None",
            cost="nothing; the backward pass makes them again",
        )


def _can_freeze(learn: Any) -> bool:
    """Say whether a Learner trains several groups of parameters, such as a body and a head, and `freeze` leaves one."""
    if learn.opt is None or getattr(learn.opt, "frozen_idx", None):
        return False
    groups: Any = getattr(learn.opt, "param_lists", ())
    return len(groups) > 1


def _has_callback(learn: Any, name: str) -> bool:
    return any(type(callback).__name__ == name for callback in learn.cbs)


def _optimizer(learn: Any) -> tuple[str, bool]:
    """Return the name of the optimizer that the Learner will make, and whether it is PyTorch's."""
    function, is_torchs = learn.opt_func, False
    while type(function) is partial:
        is_torchs |= function.func is getattr(sys.modules.get("fastai.optimizer"), "OptimWrapper", None)
        function = function.keywords.get("opt") or function.func
    return str(getattr(function, "__name__", "")), is_torchs


def _is_fused(learn: Any) -> bool:
    inner = learn.opt_func.keywords.get("opt") if type(learn.opt_func) is partial else None
    return type(inner) is partial and bool(inner.keywords.get("fused"))
