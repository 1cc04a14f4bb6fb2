"""Hashes of data, read without changing it and bounded, where evenly spread pieces stand for large data."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from nbguard.memory.scan.heap.kinds import mro_of

WHOLE = 16 * 1024**2
"""Most bytes of one tensor or array that is hashed as a whole."""

_PIECES = 256
_PIECE = 16 * 1024
_DIGITS = 16


def texts_hash(texts: Iterable[str]) -> str:
    """Return a hash of texts in their order."""
    result = hashlib.blake2b(digest_size=_DIGITS // 2)
    for text in texts:
        result.update(text.encode("utf-8", "surrogatepass"))
        result.update(b"\0")
    return result.hexdigest()


def bytes_hash(data: bytes) -> str:
    """Return a hash of bytes."""
    return hashlib.blake2b(data, digest_size=_DIGITS // 2).hexdigest()


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` places of `count`, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def tensors_hash(tensors: Sequence[Any]) -> str:
    """Return a hash of plain tensors in host memory, by their bytes; gradients, views and version counters stay as they are.

    Raises:
        ValueError: one of them lies on a device, or is not dense; the message says so.
    """
    torch: Any = sys.modules["torch"]
    result = hashlib.blake2b(digest_size=_DIGITS // 2)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for tensor in tensors:
            plain = tensor.detach()
            if plain.device.type != "cpu":
                raise ValueError(f"it is on {plain.device.type}, and reading it would wait for the device")
            if plain.layout is not torch.strided or plain.is_quantized:
                raise ValueError("it is sparse or quantized")
            result.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            for piece in _pieces(torch, plain):
                result.update(piece)
    return result.hexdigest()


def _pieces(torch: Any, plain: Any) -> Iterable[Any]:
    """Yield the bytes of a tensor, or of evenly spread pieces of it."""
    if not plain.numel():
        return
    plain = plain.resolve_conj().resolve_neg()
    size = plain.element_size()
    if plain.numel() * size <= WHOLE:
        yield plain.contiguous().reshape(-1).view(torch.uint8).numpy()
        return
    if not plain.is_contiguous():
        raise ValueError(f"it is a view of more than {WHOLE >> 20} MiB whose numbers do not lie side by side")
    flat, length = plain.reshape(-1), _PIECE // size
    for start in spread(flat.numel() - length, _PIECES):
        yield flat[start : start + length].view(torch.uint8).numpy()


def array_hash(array: Any) -> str:
    """Return a hash of a numpy array of numbers. ValueError for one of objects, whose own code would have to run."""
    if array.dtype.hasobject:
        raise ValueError("it is an array of objects")
    kind = f"{array.dtype}{array.shape}"
    if array.nbytes <= WHOLE:
        return bytes_hash(kind.encode() + array.tobytes())
    flat = array.reshape(-1) if array.flags["C_CONTIGUOUS"] else None
    if flat is None:
        raise ValueError(f"it is a view of more than {WHOLE >> 20} MiB whose numbers do not lie side by side")
    length = max(1, _PIECE // array.itemsize)
    pieces = (flat[start : start + length].tobytes() for start in spread(flat.size - length, _PIECES))
    return bytes_hash(kind.encode() + b"".join(pieces))


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of torch's, of whatever subclass."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.Tensor in mro_of(type(value))
