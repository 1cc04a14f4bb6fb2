"""Changes to a fastai Learner, on precision, batches, optimizer, gradients, loss, memory format."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from nbguard.training.prediction.fits.learner_fit import PRECISIONS, LearnerSource
from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.savings.change import Change, added_up
from nbguard.training.prediction.savings.of_model import loss_in_parts

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
