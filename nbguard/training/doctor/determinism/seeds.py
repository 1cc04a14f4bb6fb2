"""The seeds of loaders and the switches of deterministic computing, read from attributes."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from nbguard.memory.scan.heap.attributes import attribute_of
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.training.doctor.analysis.seed_checks import LoaderSeeds, SwitchStates
from nbguard.training.doctor.determinism.operations import mode_now
from nbguard.training.doctor.subject import TrialSubject

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
            is_fastai=True,
            shuffles=attribute_of(loader, "shuffle") is True,
            workers=_workers(inner),
            has_generator=attribute_of(inner, "generator") is not None,
        )
    sampler = attribute_of(loader, "sampler")
    return LoaderSeeds(
        name=name,
        shuffles=torch.utils.data.RandomSampler in mro_of(type(sampler)),
        workers=_workers(loader),
        has_generator=attribute_of(loader, "generator") is not None,
    )


def _workers(loader: Any) -> int:
    workers = attribute_of(loader, "num_workers")
    return workers if type(workers) is int else 0


def switch_states(subject: TrialSubject) -> SwitchStates:
    """Return the switches as they are."""
    return SwitchStates(
        mode=mode_now(),
        benchmark=bool(torch._C._get_cudnn_benchmark()),
        uses_gpu=any(parameter.device.type == "cuda" for parameter in subject.model.parameters()),
        hash_seed=os.environ.get("PYTHONHASHSEED", "") if not sys.flags.hash_randomization else "",
        threads=torch.get_num_threads(),
    )
