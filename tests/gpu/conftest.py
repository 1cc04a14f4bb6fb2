"""Fixtures of the tests that need a GPU. They must not need anything else: neither Jupyter nor fastai."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.gpu import device

DRY = os.environ.get("NBGUARD_DRY_GPU") == "1"
"""Set by `day.py --dry`: run on the fake runtime, as far as that can show anything."""


@pytest.fixture(scope="session")
def gpu() -> str:
    """Return the name of the GPU; skip where there is none."""
    import torch

    if not torch.cuda.is_available():  # torch counts devices: no context is opened by the test run itself
        pytest.skip("no GPU here")
    facts = device.ask()
    if reason := device.refusal(facts, dry=DRY):
        pytest.skip(reason)
    return str(facts["name"])


@pytest.fixture
def kernels(gpu: str) -> None:
    """Skip where work given to the GPU has ended before the call returns."""
    if gpu.startswith(device.FAKE) and os.environ.get("FAKE_CUDA_EVENTS") != "manual":
        pytest.skip("needs a GPU that takes its time: the fake runtime's events do not wait")


@pytest.fixture
def ipython(gpu: str) -> None:
    """Skip where there is no IPython."""
    if importlib.util.find_spec("IPython") is None:
        pytest.skip("IPython is not installed")
