"""Whatever nbguard does, it keeps none of the user's memory: each command several times, each time on a Learner of its own."""

from __future__ import annotations

import pytest

from tests.kernel.conftest import LEARNER
from tests.kernels import Kernel
from tests.thorough import half_in_ci

COUNT = "sum(issubclass(type(each), torch.Tensor) and type(each).__name__ != 'FakeTensor' for each in gc.get_objects())"
"""Tensors that are alive. torch.export keeps one without data for each program for a batch of any size."""

COMMANDS = {
    "doctor": ("%nbguard doctor learn",),
    "report": ("%gpumem", "%gpumem why learn", "%gpumem map"),
    "export": ("%nbguard fix export learn -o m", "del m"),
    "cells": ("%gpumem cells on", "learn.fit(1)", "%gpumem cells off"),
    "profile": ("%%profile_fit\nlearn.fit(1)",),
    "cleanup": ("%reset_gpu --dry-run", "%reset_gpu", "%reset_gpu learn", "learn = learner()"),
    "predict": ("%gpumem predict learn --gpu 16GiB",),
    "park": ("%reset_gpu --park learn", "%reset_gpu --unpark learn"),
    "simulate": ("%gpumem simulate 8GiB", "%gpumem", "%gpumem simulate off"),
    "determinism": ("%nbguard fix determinism learn", "%nbguard fix determinism --undo"),
    "float32": ("f = nbguard.in_float32(learn, '0')", "f.undo(); del f"),
    "record": ("%nbguard record -o r", "del r"),
}


@pytest.mark.parametrize("command", half_in_ci(COMMANDS))
def test_no_tensor_is_left(kernel: Kernel, command: str) -> None:
    kernel.run(LEARNER).ok()
    kernel.run("%load_ext nbguard\nimport nbguard").ok()
    counts = []
    for _ in range(3):
        kernel.run("learn = learner()").ok()
        for cell in COMMANDS[command]:
            kernel.run(cell).ok()
        kernel.run("del learn; _ = gc.collect()").ok()
        counts.append(kernel.value(COUNT))
    assert counts[1] == counts[2], counts
