"""torch without the user's additions, where a call runs no code of theirs; the hooks of a module; and torch.compile's use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbguard.memory.scan.heap.attributes import attribute_of

# --- The hooks that a module of PyTorch's has, as the user put them up.


_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: Any) -> Iterator[dict[int, Any]]:
    """Yield the dicts that keep a module's hooks, by their numbers; only those that have any."""
    for kind in _KINDS:
        hooks = attribute_of(module, kind)
        if hooks:
            yield hooks


# --- torch.compile, and whether it compiled anything in this process.


def has_compiled() -> bool:
    """Say whether a compiler backend has been used since the last reset. Optimizers import the compiler without using it."""
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    known = getattr(module, "cached_backends", None)
    if module is None or type(known) is not dict:
        return module is not None
    return any(backend is not None for backend in known.values())  # None if code that is not to be compiled has run


def name_in_model(name: str) -> str:
    """Return the name of a submodule as in the model that was compiled: torch.compile puts a step of its own into names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Leave out tensor subclasses' code and all modes: of functions, of dispatch (fake tensors), of inference."""
    torch: Any = sys.modules["torch"]
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Keep this thread's dispatch modes (a simulated device, a FLOP counter) from seeing operations of ours.

    Unpacking a graph's saved tensors is one. A tensor subclass's own dispatch goes on, unlike under `plain_torch`: torch's
    nested and distributed tensors are unpacked by theirs.
    """
    dispatch: Any = sys.modules["torch.utils._python_dispatch"]
    with dispatch._disable_current_modes():
        yield
