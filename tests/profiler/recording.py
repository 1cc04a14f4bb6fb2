"""A recording around a fit, with the parts that a test is about."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from nbguard.training.profiler.instruments.instruments import Instrument
from nbguard.training.profiler.record.fastai_loop import FastaiLoop
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.profiler.record.torch_loop import TorchLoop


@contextmanager
def recording(*parts: Instrument) -> Iterator[Recorder]:
    """Record what runs inside. No part may make a mistake."""
    recorder = Recorder()
    loop = TorchLoop(recorder)
    fronts = [loop, FastaiLoop(recorder, loop)]
    for front in fronts:
        front.start()
    for part in parts:
        part.start(recorder)
    try:
        yield recorder
    finally:
        for part in reversed(parts):
            part.stop()
        for front in reversed(fronts):
            front.stop()
        recorder.stop()
    assert recorder.failed == [], recorder.failed


def seed(number: int = 0) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def generators() -> tuple[object, ...]:
    """Return the states of all generators, to compare."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
