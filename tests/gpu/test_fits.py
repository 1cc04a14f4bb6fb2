"""A profile on a GPU leaves the fit as it is: the same bits, nothing that waits; and it reads what arrives late."""

from __future__ import annotations

import pytest

from tests.gpu.child import answer
from tests.gpu.conftest import DRY
from tests.gpu.profiled import names

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
PROFILED = "tests.gpu.profiled"


@pytest.mark.parametrize("name", names())
def test_a_profiled_fit_ends_with_the_same_bits(name: str) -> None:
    assert answer(PROFILED, "identical", name) or DRY  # where kernels compute nothing, a fit ends with what the memory held


def test_no_call_of_a_profile_waits_for_the_gpu() -> None:
    found = answer(PROFILED, "without_waiting")

    assert found["notes"] == []
    assert found["batches"] > 100


@pytest.mark.skipif(DRY, reason="kernels of the fake runtime compute nothing")
def test_a_loss_of_any_batch_is_read() -> None:
    found = answer(PROFILED, "late_nan")

    assert f"the loss is NaN in batch {found['batch']}" in found["first"]
