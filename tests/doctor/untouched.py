"""All that a diagnosis must leave as it was, bit by bit."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import nn


def fingerprint(model: nn.Module, learn: Any = None) -> dict[str, Any]:
    """Return everything that must stay: bits, versions and identities of tensors, modes, hooks, generators, the loader."""
    facts: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "switches": (
            torch.get_deterministic_debug_mode(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        ),
        "global hooks": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
            len(nn.modules.module._global_backward_hooks),
        ),
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        facts[f"tensor {name}"] = (id(tensor), tensor._version, _bits(tensor), tensor.requires_grad)
        facts[f"gradient {name}"] = None if tensor.grad is None else (id(tensor.grad), _bits(tensor.grad))
    for path, module in model.named_modules():
        facts[f"module {path}"] = (id(module), module.training, tuple(module._forward_hooks), tuple(module._backward_hooks))
        facts[f"attributes {path}"] = {name: _value(value) for name, value in vars(module).items()}
    if learn is not None:
        loader = learn.dls.train
        facts["loader"] = {name: _value(value) for name, value in vars(loader).items()}
        facts["order"] = loader.rng.getstate() if hasattr(loader, "rng") else None
        facts["learner"] = {name: id(value) for name, value in vars(learn).items() if not name.startswith("_")}
        facts["optimizer"] = None if learn.opt is None else [_value(state) for state in learn.opt.state.values()]
    return facts


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version, _bits(value)
    if isinstance(value, np.random.Generator):
        return id(value), str(value.bit_generator.state)
    if isinstance(value, (random.Random,)):
        return id(value), value.getstate()
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return [_value(part) for part in value]
    if isinstance(value, dict):
        return {key: id(part) for key, part in value.items()}
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


def _bits(tensor: torch.Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(flat.numpy().tobytes()).hexdigest()
