"""What nbguard says of a GPU against what torch and the driver say. Each test looks from a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

from nbguard.memory.core.analysis import NOT_OURS
from tests.gpu.child import answer
from tests.gpu.workloads import EXPANDABLE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
SCENES = "tests.gpu.scenes"
LARGE_SEGMENT = 20 * 1024**2

OUTSIDE = NOT_OURS | {"context"}
STATES = ("fragments", "pools", "pool_left", "graph", "workspaces")


@pytest.fixture(scope="module", params=[(state, settings) for state in STATES for settings in ("", EXPANDABLE)], ids="-".join)
def said(request: pytest.FixtureRequest, gpu: str) -> dict[str, Any]:
    state, settings = request.param
    found: dict[str, Any] = answer(SCENES, "reported", state, settings=settings)
    return found


def test_the_parts_readd_to_the_device(said: dict[str, Any]) -> None:
    parts = said["parts"]

    assert sum(parts.values()) == said["total"][0] == said["total"][1]
    assert min(parts.values()) >= 0
    assert parts["allocated"] == said["allocated"]
    assert sum(nbytes for name, nbytes in parts.items() if name not in OUTSIDE) == said["pools"] == said["reserved"]
    before, after = said["free"]
    assert min(before, after) <= parts["free"] <= max(before, after), "others may use the device meanwhile"


def test_the_holders_readd_to_what_is_allocated(said: dict[str, Any]) -> None:
    assert sum(said["holders"].values()) == said["allocated"]


def test_releasable_is_what_an_empty_cache_gives_back(said: dict[str, Any]) -> None:
    """With graphs and pools alive, too, whose free blocks are kept. A pool that was let go looks like one in use."""
    least = said["parts"]["releasable"]
    most = least + said["parts"].get("graph pools", 0) * said["is_let_go"]

    assert least <= said["given_back"] <= most


def test_workspaces_are_a_row_of_their_own() -> None:
    """cuBLAS takes them through torch's allocator and no Python object holds them."""
    said = answer(SCENES, "reported", "workspaces")

    assert said["holders"]["cuBLAS workspaces"] == said["workspaces"] > 0


def test_the_pool_of_a_graph_is_shown_and_not_promised() -> None:
    said = answer(SCENES, "reported", "graph")

    assert 0 < said["parts"]["graph pools"] <= said["private"]
    assert said["private"] <= said["reserved"] - said["given_back"], "an empty cache leaves a pool in use as it is"


def test_looking_does_not_initialise_cuda() -> None:
    found = answer(SCENES, "looking_before_cuda")

    assert "not initialised in this kernel yet" in found["said"][0]
    assert not found["initialized"]
    assert not found["context"]


@pytest.mark.parametrize("settings", ["", EXPANDABLE], ids=["", "expandable"])
@pytest.mark.parametrize("kind", ["name", "cycle"])
def test_what_was_promised_comes_back(kind: str, settings: str) -> None:
    found = answer(SCENES, "cleanup", kind, settings=settings)

    assert found["promised"] == found["realised"] == found["allocated"] > 0
    assert found["extra"] == 0
    promised, given_back = found["reserved"]
    assert abs(promised - given_back) <= LARGE_SEGMENT


@pytest.mark.usefixtures("kernels")
def test_what_a_side_stream_still_uses_is_pending_and_then_free() -> None:
    found = answer(SCENES, "pending")

    assert found["runs_on"], "the side stream ended before it could be looked at"
    during, afterwards = found["during"], found["afterwards"]
    assert during["parts"]["pending"] == during["active"] - during["allocated"] > 24 * 1024**2
    assert "pending" not in afterwards["parts"]
    assert sum(during["parts"].values()) == during["total"][0]


@pytest.mark.usefixtures("kernels")
def test_looking_does_not_wait_for_the_gpu() -> None:
    found = answer(SCENES, "looking_while_the_gpu_works")

    assert found["devices"] == 1
    assert found["runs_on"], "the kernel had ended when report() returned"
