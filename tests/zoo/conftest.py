"""The zoo's kernels: in most of them looks go through the notebook's own objects alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.advice import follow_printed
from tests.kernels import Kernel, Zygote
from tests.zoo.diagnose import without_libraries


@pytest.fixture
def kernel(fastai_zygote: Zygote, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A fresh kernel in which fastai is loaded and nbguard is not."""
    kernel = Kernel(fastai_zygote, frozen=without_libraries(request))
    kernel.printed = follow_printed
    yield kernel
    kernel.stop()
