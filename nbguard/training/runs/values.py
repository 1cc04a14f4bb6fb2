"""Values of the user's as text: numbers, texts and containers of them. Anything else is named by its type only."""

from __future__ import annotations

import functools
import pathlib
import sys
import types
from typing import Any

from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, name_of

_ITEMS = 16
_DEPTH = 3
_LONGEST = 120


def text_of(value: Any, depth: int = _DEPTH) -> str:
    """Return a value as text. No code of the user's runs: objects but numbers, texts and containers become types."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return repr(value)
    if kind is str:
        return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
    if kind in (tuple, list) and depth:
        parts = [text_of(part, depth - 1) for part in value[:_ITEMS]]
        return f"({', '.join([*parts, *(['…'] if len(value) > _ITEMS else [])])})"
    if kind is dict and depth:
        parts = [f"{text_of(key, 0)}: {text_of(part, depth - 1)}" for key, part in list(value.items())[:_ITEMS]]
        return "{" + ", ".join([*parts, *(["…"] if len(value) > _ITEMS else [])]) + "}"
    return _number(value) or _function(value, depth) or _tensor(value) or _library(value) or f"<{name_of(kind)}>"


def _number(value: Any) -> str:
    """Return a number or text of a subclass, such as numpy's float64, by the base's own function; empty for anything else."""
    bases = mro_of(type(value))
    for base in (float, int, str):
        if base in bases:
            return str.__str__(value)[:_LONGEST] if base is str else base.__repr__(value)
    if issubclass(type(value), pathlib.PurePath) and type(value).__module__.startswith("pathlib"):
        return str(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and numpy.generic in bases and type(value).__module__ == "numpy":
        return repr(value.item())
    return ""


def _function(value: Any, depth: int) -> str:
    """Return the name of a function or class, or a partial's function with its keywords; empty for anything else."""
    kind = type(value)
    if kind is functools.partial:
        more = [f"{key}={text_of(part, depth - 1)}" for key, part in value.keywords.items()] if depth else []
        return f"{text_of(value.func, 0)}({', '.join([*(text_of(part, 0) for part in value.args), *more])})"
    if kind in (types.FunctionType, types.BuiltinFunctionType):
        return str(value.__name__)
    if kind is types.MethodType:
        return _function(value.__func__, depth)
    return name_of(value) if type in mro_of(kind) else ""


def _tensor(value: Any) -> str:
    """Return a small tensor of the host's by its numbers, another one by its shape: to read from a device would wait for it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or (type(value) is not torch.Tensor and torch.Tensor not in mro_of(type(value))):
        return ""
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.detach()
        if plain.device.type == "cpu" and plain.numel() <= _ITEMS and plain.layout is torch.strided:
            return text_of(_rounded(plain.tolist()))
        return f"tensor of {tuple(plain.shape)} on {plain.device.type}"


def _rounded(value: Any) -> Any:
    if type(value) is list:
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if type(value) is float else value


def _library(value: Any) -> str:
    """Return torch's dtypes and devices as they are written; empty for anything else."""
    torch: Any = sys.modules.get("torch")
    return str(value) if torch is not None and type(value) in (torch.dtype, torch.device) else ""


def described(value: Any, limit: int = 8) -> str:
    """Return an object by its class and the arguments that it was made with, where it keeps them: `Resize(size=224)`.

    fastcore's `store_attr` keeps them by name; of a torchvision transform they are its attributes.
    """
    if type(value) in (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial):
        return text_of(value)
    stored = attribute_of(value, "__stored_args__")
    if type(stored) is not dict:
        torchs = type(value).__module__.startswith(("torchvision.", "torch.", "albumentations."))
        stored = _atoms(value) if torchs else {}
    arguments = [f"{name}={text_of(part, 2)}" for name, part in list(stored.items())[:limit] if type(name) is str]
    return f"{name_of(type(value))}({', '.join(arguments)})" if arguments else name_of(type(value))


def _atoms(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a library's that are numbers, texts or tuples of them."""
    from nbguard.memory.scan.heap.kinds import attributes_of

    own = attributes_of(value) or {}
    simple = (bool, int, float, str, tuple, list)
    return {
        name: part for name, part in own.items() if not name.startswith("_") and type(part) in simple and name != "training"
    }
