"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.kernels import FASTAI, Kernel, Zygote
from tests.thorough import MORE

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported: tests run beside each other as it is

pytest_plugins = ["tests.fake_cuda.plugin"]

# The same examples every time, however slow the machine.
settings.register_profile("same", derandomize=True, deadline=None, max_examples=200 * MORE)
settings.load_profile("same")


@pytest.fixture(scope="session")
def fastai_zygote() -> Iterator[Zygote]:
    zygote = Zygote(FASTAI)
    yield zygote
    zygote.stop()


@pytest.fixture(scope="session")
def plain_zygote() -> Iterator[Zygote]:
    zygote = Zygote()
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at this process goes first: a look takes the longer, the more other tests have imported."""
    items.sort(key=lambda item: item.path.parent.name not in ("cleanup", "scan"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")
