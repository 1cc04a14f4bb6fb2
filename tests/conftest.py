"""Fixtures that tests of several rooms share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels import Kernel, Zygote

pytest_plugins = ["tests.fake_cuda.plugin"]


@pytest.fixture(scope="session")
def fastai_zygote() -> Iterator[Zygote]:
    zygote = Zygote(fastai=True)
    yield zygote
    zygote.stop()


@pytest.fixture(scope="session")
def plain_zygote() -> Iterator[Zygote]:
    zygote = Zygote(fastai=False)
    yield zygote
    zygote.stop()


@pytest.fixture
def kernel(fastai_zygote: Zygote) -> Iterator[Kernel]:
    """A fresh kernel in which fastai is loaded and nbguard is not."""
    kernel = Kernel(fastai_zygote)
    yield kernel
    kernel.stop()


@pytest.fixture
def plain_kernel(plain_zygote: Zygote) -> Iterator[Kernel]:
    """A fresh kernel in which nothing is imported: no torch."""
    kernel = Kernel(plain_zygote)
    yield kernel
    kernel.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")
