"""Modules whose memory cannot be predicted, refused by their path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbguard.errors import UnpredictableError

_REFUSED = {
    "OptimizedModule": "torch.compile plans its own buffers",
    "DataParallel": "its replicas live on several devices",
    "DistributedDataParallel": "its buckets depend on the process group",
    "FullyShardedDataParallel": "its shards depend on the process group",
    "FSDPModule": "its shards depend on the process group",
    "ScriptModule": "TorchScript runs its operators without Python",
    "RecursiveScriptModule": "TorchScript runs its operators without Python",
}
"""Modules whose memory cannot be predicted, by the class of torch's that they are, and why."""

_COMPRESSED = ("apex", "bitsandbytes", "torchao")
"""Packages whose optimizers have kernels and states of their own."""


def refuse_optimizers(optimizers: Iterable[tuple[str, Any]]) -> None:
    """Refuse optimizers whose memory cannot be predicted, by name.

    Args:
        optimizers: (name, optimizer) of a fit.

    Raises:
        UnpredictableError: there is one of a package with kernels of its own, such as those that keep 8 bits of their state.
    """
    for name, optimizer in optimizers:
        package = type(optimizer).__module__.partition(".")[0]
        if package in _COMPRESSED:
            raise UnpredictableError(f"{name} is {package}'s {type(optimizer).__name__}, which has its own state and kernels")


def refuse(modules: Iterable[tuple[str, Any]]) -> None:
    """Refuse modules whose memory cannot be predicted, by the path to the first of them.

    Args:
        modules: (name, module) of the models of a fit.

    Raises:
        UnpredictableError: there is such a module.
    """
    for name, model in modules:
        for path, module in model.named_modules():
            for kind in type(module).__mro__:
                reason = _REFUSED.get(kind.__name__)
                if reason and str(kind.__module__).partition(".")[0] == "torch":
                    where = f"{name}.{path}" if path else f"the model {name}" if name != "model" else "the model"
                    raise UnpredictableError(f"{where} is a {kind.__name__}: {reason}")
