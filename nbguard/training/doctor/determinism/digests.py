"""Hashes of tensors by their bytes: NaN equals NaN, and −0 is not 0. A sum could not tell a permutation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from nbguard.memory.scan.heap.kinds import attributes_of, mro_of


def digest(tensor: torch.Tensor) -> bytes:
    """Return 16 bytes that stand for the bytes of a tensor, its shape and its type."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        plain = tensor.detach()
        if plain.is_quantized:
            plain = plain.int_repr()
        parts = _dense(plain)
        header = f"{plain.dtype} {tuple(plain.shape)}".encode()
        result = hashlib.sha1(header, usedforsecurity=False)  # processors have instructions for it: the quickest of hashlib's
        for part in parts:
            result.update(flat_bytes(part).cpu().numpy() if part.numel() else b"")
    return result.digest()[:16]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor one behind the other, without a copy where they lie so."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride() != (1,):  # one element that was expanded counts as contiguous
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8)


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor consists of; its own conjugation is carried out."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [tensor.resolve_conj().resolve_neg()]


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's inputs or outputs: tuples, lists, dicts, objects with attributes."""
    bases = mro_of(type(value))
    if torch.Tensor in bases:
        yield value
    elif depth and (tuple in bases or list in bases):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and dict in bases:
        for part in dict.values(value):
            yield from tensors_in(part, depth - 1)
    elif depth and type(value).__module__ != "builtins" and (attributes := attributes_of(value)) is not None:
        for part in list(attributes.values()):
            yield from tensors_in(part, depth - 1)
