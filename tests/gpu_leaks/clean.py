"""A suite of a thousand tests that leave nothing behind, though they make, keep for a while and share tensors."""

from __future__ import annotations

COUNT = 1000

SUITE = """
import gc
import unittest

import pytest
import torch

SHARED = torch.nn.Linear(512, 512)
SMALL = []


@pytest.fixture(scope="session")
def model():
    return torch.nn.Linear(600, 600)


@pytest.fixture(scope="module")
def bag():
    batches = [torch.zeros(1 << 19)]
    yield batches
    batches.clear()


@pytest.fixture
def batch():
    return torch.zeros(1 << 19)


@pytest.mark.parametrize("n", range(553))
def test_plain(n):
    assert torch.ones(100).sum() == 100


@pytest.mark.parametrize("n", range(100))
def test_uses_the_module_s_weights(n):
    with torch.no_grad():
        views = [SHARED.weight[:2], SHARED.weight.view(-1)]
    SMALL[:] = views  # new tensors on old memory


@pytest.mark.parametrize("n", range(100))
def test_trains_the_session_s_model(model, n):
    model(torch.ones(2, 600)).sum().backward()


@pytest.mark.parametrize("n", range(100))
def test_a_fixture_of_its_own(batch, n):
    assert batch.numel() == 1 << 19


@pytest.mark.parametrize("n", range(2))
def test_fills_the_module_s_bag(bag, n):
    bag[:] = [torch.zeros(1 << 18)]


@pytest.mark.parametrize("n", range(50))
def test_small_things_stay(n):
    SMALL.append(torch.zeros(1 << 10))


@pytest.mark.parametrize("n", range(15))
def test_a_cycle(n):
    cycle = [torch.zeros(1 << 19)]
    cycle.append(cycle)


class TestOnSelf:
    def setup_method(self):
        self.batch = torch.zeros(1 << 18)

    def teardown_method(self):
        del self.batch

    @pytest.mark.parametrize("n", range(40))
    def test_on_self(self, n):
        assert self.batch.numel()


class TestOfUnittest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = torch.nn.Linear(600, 600)

    @classmethod
    def tearDownClass(cls):
        del cls.model

    def setUp(self):
        self.batch = torch.zeros(1 << 19)

    def test_a(self):
        self.model(torch.ones(1, 600))

    def test_b(self):
        self.model.extra = torch.zeros(1 << 19)


@pytest.mark.parametrize("n", range(38))
def test_a_loop(n):
    for _ in range(20):
        loss = (torch.ones(1 << 10, requires_grad=True) * 2).exp().sum()
        loss.backward()
    gc.collect(0)
"""
