"""A suite of tests that leave memory behind, five of each of ten kinds; `HOLDERS` is what each failure must name.

It is written into a folder as `test_planted.py` and run there: a file of the user's, not of nbguard's tests.
"""

from __future__ import annotations

from importlib import metadata

PLUGIN = "nbguard.frontend.gpu_leaks.plugin"
IS_INSTALLED = any(point.value == PLUGIN for point in metadata.entry_points(group="pytest11"))
"""Whether pytest finds the plugin by itself: an environment may be older than its point of entry."""

OPTIONS = () if IS_INSTALLED else ("-p", PLUGIN)

COUNT = 5

HOLDERS = {
    "a_list": "test_planted.py: CACHE[",
    "a_class": "test_planted.py: Registry.kept['",
    "lru_cache": "test_planted.py: cached",
    "a_forward_hook": "test_planted.py: NET._forward_hooks[",
    "an_exception": "test_planted.py: ERRORS[",
    "a_gradient": "test_planted.py: NETS[",
    "an_optimizer": "test_planted.py: OPTIMIZERS[",
    "a_graph": "test_planted.py: LOSSES[",
    "a_module_of_the_package": "helpers.py: STATE['",
    "a_thread": "running wait() in thread leak-",
}

HELPERS = """
STATE = {}
"""

CONFTEST = """
import gc

import torch

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # half a million objects of libraries, which hold nothing here
"""

WITH_OPTIMIZERS = f"import torch._dynamo  # an optimizer would import it\n{CONFTEST}"

SUITE = """
import functools
import threading

import pytest
import torch

import helpers

CACHE, ERRORS, LOSSES, OPTIMIZERS, HANDLES = [], [], [], [], []
NET = torch.nn.Linear(4, 4)
NETS = [torch.nn.Linear(600, 600) for _ in range(5)]
END = threading.Event()  # never: what ends at the end of the last test is no leak
numbers = pytest.mark.parametrize("n", range(5))


class Registry:
    kept = {}


@functools.lru_cache(maxsize=None)
def cached(n):
    return two_mib()


def two_mib():
    return torch.zeros(1 << 19)


@numbers
def test_a_list(n):
    CACHE.append(two_mib())


@numbers
def test_a_class(n):
    Registry.kept[f"key {n}"] = {"deep": [two_mib()]}


@numbers
def test_lru_cache(n):
    cached(n)


@numbers
def test_a_forward_hook(n):
    mask = two_mib()
    NET.register_forward_hook(lambda module, args, output: None if mask is None else output)


def fails(n):
    activations = two_mib()
    raise ValueError(n)


@numbers
def test_an_exception(n):
    with pytest.raises(ValueError) as caught:
        fails(n)
    ERRORS.append(caught.value)


@numbers
def test_a_gradient(n):
    NETS[n](torch.ones(2, 600)).sum().backward()


@numbers
def test_an_optimizer(n):
    weight = torch.nn.Parameter(two_mib())
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    OPTIMIZERS.append(optimizer)


@numbers
def test_a_graph(n):
    weight = torch.ones(1 << 19, requires_grad=True)
    LOSSES.append((weight * 2).exp().exp().sum())


@numbers
def test_a_module_of_the_package(n):
    helpers.STATE[f"batch {n}"] = (two_mib(), two_mib())


@numbers
def test_a_thread(n):
    def wait(batch, started):
        started.set()
        END.wait()

    started = threading.Event()
    threading.Thread(target=wait, args=(two_mib(), started), name=f"leak-{n}", daemon=True).start()
    started.wait()
"""
