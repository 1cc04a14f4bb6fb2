"""The seeds of a run: generators that objects have of their own, which no seed of a library reaches, loaders, and switches."""

from __future__ import annotations

import copy
import os
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nbguard.memory.scan.heap.kinds import attribute_of, mro_of
from nbguard.training.doctor.analysis.seed_checks import LoaderSeeds, SwitchStates
from nbguard.training.doctor.determinism.operations import mode_now
from nbguard.training.doctor.subject import TrialSubject

SEEDED: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
"""Ids of the generators that have been seeded, by whatever did so, which keeps them: numpy's cannot be held weakly."""


def is_seeded(generator: Any) -> bool:
    """Say whether a generator has its state from a seed that nbguard set and has not undone."""
    return any(id(generator) in ids for ids in SEEDED.values())


def state_of(generator: Any) -> tuple[Any, Callable[[Any], object]] | None:
    """Return (state, function that puts a state back) of a generator object, or None if it is no generator."""
    torch: Any = sys.modules["torch"]
    numpy: Any = sys.modules.get("numpy")
    bases = mro_of(type(generator))
    if random.Random in bases:
        return random.Random.getstate(generator), lambda state: random.Random.setstate(generator, state)
    if torch.Generator in bases:
        return generator.get_state(), generator.set_state
    if numpy is None:
        return None
    if numpy.random.Generator in bases:
        return _bits_of(generator.bit_generator)
    if numpy.random.RandomState in bases:
        return generator.get_state(legacy=False), generator.set_state
    if numpy.random.BitGenerator in bases:
        return _bits_of(generator)
    return None


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator that is an object of its own, of the kinds that `state_of` knows."""
    torch: Any = sys.modules["torch"]
    if random.Random in mro_of(type(generator)):
        random.Random.seed(generator, seed)
    elif torch.Generator in mro_of(type(generator)):
        generator.manual_seed(seed)
    elif hasattr(generator, "seed"):
        generator.seed(seed)
    else:  # numpy's: a state from a new one of the same kind
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state


def _bits_of(bits: Any) -> tuple[Any, Callable[[Any], object]]:
    def put(state: Any) -> None:
        bits.state = state

    return copy.deepcopy(bits.state), put


_NAMES = ("the training loader", "the validation loader")


def loaders_of(subject: TrialSubject) -> list[Any]:
    """Return the loaders of a subject, the training one first."""
    if subject.learn is None:
        return [] if subject.loader is None else [subject.loader]
    loaders = attribute_of(attribute_of(subject.learn, "dls"), "loaders")
    return list(loaders) if type(loaders) is list else []


def loader_seeds(subject: TrialSubject) -> tuple[LoaderSeeds, ...]:
    """Return where the random numbers of each loader come from."""
    return tuple(_seeds(loader, name) for loader, name in zip(loaders_of(subject), _NAMES, strict=False))


def _seeds(loader: Any, name: str) -> LoaderSeeds:
    inner = attribute_of(loader, "fake_l")
    if inner is not None:
        return LoaderSeeds(
            name=name,
            is_learners=True,
            shuffles=attribute_of(loader, "shuffle") is True,
            workers=_workers(inner),
            has_generator=attribute_of(inner, "generator") is not None,
        )
    sampler = sampler_of(loader)
    own = has_generator(sampler)
    source = _drawn_by(sampler)
    return LoaderSeeds(
        name=name,
        shuffles=own is not None,
        workers=_workers(loader),
        has_generator=attribute_of(loader, "generator") is not None,
        sampler=type(sampler).__name__ if source or (own is False and not _is_shuffles(sampler, loader)) else "",
        source=source,
    )


_TORCHS = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
"""Samplers of torch's that draw the order: from a generator of their own, or from the global one."""
_DRAWS = frozenset(("choice", "choices", "permutation", "rand", "randint", "randperm", "sample", "shuffle"))
"""Functions that draw, of random, numpy.random and torch."""
_OWN = frozenset(("Generator", "Random", "RandomState", "default_rng", "generator", "manual_seed", "rng", "seed"))
"""Names in the code of a sampler with a seed or generator of its own."""


def sampler_of(loader: Any) -> Any:
    """Return the sampler that gives a loader of torch's its order: also the one of batches, or the one inside of that."""
    batches = attribute_of(loader, "batch_sampler")
    inner = attribute_of(batches, "sampler")
    return inner if inner is not None else batches if batches is not None else attribute_of(loader, "sampler")


def has_generator(sampler: Any) -> bool | None:
    """Say whether a sampler of torch's that draws has a generator of its own; None for any other sampler."""
    if not any(getattr(torch.utils.data, name) in mro_of(type(sampler)) for name in _TORCHS):
        return None
    return attribute_of(sampler, "generator") is not None


def _is_shuffles(sampler: Any, loader: Any) -> bool:
    """Say whether a sampler may be the one that `shuffle=True` made, which has the loader's generator."""
    return type(sampler) is torch.utils.data.RandomSampler and attribute_of(loader, "generator") is None


def _drawn_by(sampler: Any) -> str:
    """Return the function of a global generator by which a class that is not torch's draws; empty if none is seen."""
    kind = type(sampler)
    if kind.__module__.partition(".")[0] == "torch":
        return ""
    code = getattr(vars(kind).get("__iter__"), "__code__", None)
    names = () if code is None else code.co_names
    if _OWN.intersection(names):
        return ""
    at = next((at for at, name in enumerate(names) if name in _DRAWS), None)
    return "" if at is None else ".".join(names[max(0, at - 1) : at + 1])


def _workers(loader: Any) -> int:
    workers = attribute_of(loader, "num_workers")
    return workers if type(workers) is int else 0


def switch_states(subject: TrialSubject) -> SwitchStates:
    """Return the switches as they are."""
    return SwitchStates(
        mode=mode_now(),
        benchmark=bool(torch._C._get_cudnn_benchmark()),
        uses_gpu=any(parameter.device.type == "cuda" for parameter in subject.model.parameters()),
        tf32=_tf32(),
        needs_cublas=_CUBLAS in (torch.use_deterministic_algorithms.__doc__ or "") and _CUBLAS not in os.environ,
        hash_seed=os.environ.get("PYTHONHASHSEED", "") if not sys.flags.hash_randomization else "",
        threads=torch.get_num_threads(),
    )


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""A variable that deterministic mode asked for, as its help says, until each stream had a workspace of its own."""


def _tf32() -> tuple[str, ...]:
    """Return the switches that are on for TensorFloat-32, as one writes them."""
    backends = torch.backends
    switches = {
        "torch.backends.cuda.matmul.allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
    }
    return tuple(name for name, read in switches.items() if _is_on(read))


def _is_on(read: Callable[[], object]) -> bool:
    try:
        return read() is True
    except RuntimeError:  # set through the newer `fp32_precision`, which this one does not show
        return False
