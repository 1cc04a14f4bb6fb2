"""Seeds as they were set, and the state of each generator of random numbers. Nothing is drawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from nbguard.memory.scan.devices.generators import LibraryGenerators, is_in_use
from nbguard.training.runs.analysis.cell_seeds import seeds_in
from nbguard.training.runs.analysis.record import NEVER_SET
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.fingerprint import bytes_hash, texts_hash

_DEFAULT = 67280421310721
"""`c10::default_rng_seed_val`: the seed of a device's generator where none was set."""
_LARGEST = 2**32
"""Numbers from here on are none that people choose: torch's own generator begins with one that the system draws."""


def collect_seeds(facts: FactCollector, cells: Sequence[str] | None) -> None:
    """Collect the seeds: torch tells its own; Python and numpy keep none, so that only the cells tell of it."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        seed = torch.initial_seed()
        facts.add("seeds", "torch", seed if is_chosen(seed) else NEVER_SET)
        if not is_chosen(seed):
            facts.add("generators", "torch, seed that the system drew", seed)
        if is_in_use(torch.cuda):
            facts.attempt("seeds", "cuda", lambda: facts.add("seeds", "cuda", torch.cuda.initial_seed()))
    fixed = os.environ.get("PYTHONHASHSEED", "") if not sys.flags.hash_randomization else ""
    facts.add("seeds", "hash seed", fixed or "random in each process")
    if cells is None:
        facts.miss("seeds", "calls", "without IPython the code that sets seeds is not known")
        return
    calls = [call.text for call in seeds_in(cells).seeds]
    unset = torch is None or not is_chosen(torch.initial_seed())
    facts.add("seeds", "calls", "; ".join(calls) or ("none" if unset else "none in a cell"))


def is_chosen(seed: int) -> bool:
    """Return whether somebody set this seed."""
    return seed != _DEFAULT and abs(seed) < _LARGEST


def collect_generators(facts: FactCollector) -> None:
    """Collect a hash of the state of each generator of the libraries, of devices only where they are in use."""
    for name, state in LibraryGenerators().states:
        facts.attempt("generators", name, lambda name=name, state=state: facts.add("generators", name, _hash(state)))  # type: ignore[misc]


def generator_hash(state: Any) -> str:
    """Return a hash of the state of a generator, as the library gives it."""
    return _hash(state)


def _hash(state: Any) -> str:
    """Return a hash of a state: tuples of numbers, arrays and tensors of bytes."""
    return texts_hash(_parts(state))


def _parts(state: Any) -> list[str]:
    kind = type(state)
    if kind in (tuple, list):
        return [part for each in state for part in _parts(each)]
    if kind is dict:
        return [part for key in sorted(state) for part in (str(key), *_parts(state[key]))]
    torch: Any = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return [bytes_hash(state.numpy().tobytes())]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return [bytes_hash(state.tobytes())]
    return [repr(state)]  # a number or text of a library's own state
