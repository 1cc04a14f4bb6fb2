"""The search for the largest batch: exact for whatever grows with the batch, in few tries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.errors import NbguardError
from nbguard.training.prediction.predict import predict
from nbguard.training.prediction.prediction import LargestBatch, _largest
from nbguard.training.prediction.savings import _search
from tests.prediction.fits import make


@given(limit=st.integers(0, 5000), more=st.integers(0, 5000), estimate=st.integers(0, 12_000))
def test_the_search_ends_at_the_last_number_that_holds(limit: int, more: int, estimate: int) -> None:
    most, tried = limit + more, list[int]()

    def holds(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert _search(holds, estimate, most) == limit
    assert len(tried) == len(set(tried))
    assert all(1 <= number <= most for number in tried)


@given(limit=st.integers(100, 100_000), off=st.floats(-0.05, 0.05))
def test_an_estimate_that_is_near_takes_few_tries(limit: int, off: float) -> None:
    tried = list[int]()
    _search(lambda number: bool(tried.append(number)) or number <= limit, int(limit * (1 + off)), 10**7)
    assert len(tried) <= 3 + (limit // 8).bit_length()


@pytest.mark.parametrize(
    ("largest", "sentence"),
    [
        (LargestBatch(sure=0, limit=0, is_whole_set=False, traces=3), "largest batch: not even one item fits"),
        (LargestBatch(sure=9, limit=9, is_whole_set=True, traces=3), "largest batch: 9 fits, the whole training set"),
        (
            LargestBatch(sure=60, limit=64, is_whole_set=False, traces=7),
            "largest batch: 60 is sure to fit; up to 64 may fit, with nothing left for memory that cannot be computed",
        ),
        (
            LargestBatch(sure=None, limit=64, is_whole_set=False, traces=7),
            "largest batch: none is sure to fit; up to 64 may fit, with nothing left for memory that cannot be computed",
        ),
    ],
)
def test_it_is_said_in_a_sentence(largest: LargestBatch, sentence: str) -> None:
    assert _largest(largest) == sentence


def test_small_batches_that_change_no_peak_do_not_mislead_the_search() -> None:
    """The optimizer's step makes the peak of small batches; the whole set of 40 items fits, and one item of BatchNorm fails."""
    found = predict(make("mlp", "cpu", 8, items=(40, 8)), gpu="16GiB", largest=True).largest
    assert found is not None
    assert (found.sure, found.limit, found.is_whole_set) == (40, 40, True)


def test_without_a_gpu_there_is_no_largest_batch() -> None:
    with pytest.raises(NbguardError, match=r"name one, as in nbguard.predict\(learn, gpu='16GiB', largest=True\)"):
        predict(make("mlp", "cpu", 8), largest=True)


def test_a_fit_that_fails_on_its_last_batch_says_so() -> None:
    with pytest.raises(NbguardError, match=r"the fit itself would fail with batches of 8, 1 items: ValueError"):
        predict(make("mlp", "cpu", 8, items=(17, 8)))
