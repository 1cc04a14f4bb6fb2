"""Stand-ins for released objects, as `%debug` meets them."""

from __future__ import annotations

import copy

import pytest

from nbguard.memory.cleanup.apply.tracebacks import Placeholder


def test_an_attribute_that_has_gone_is_told_with_what_was_released() -> None:
    with pytest.raises(AttributeError, match=r"no sum any more: nbguard.release\(\) released this Tensor 2097152 float32$"):
        Placeholder("Tensor 2097152 float32").sum()
    with pytest.raises(AttributeError, match=r"Tensor 6 float32; its values are in \.value"):
        Placeholder("Tensor 6 float32", [1, 2]).mean()


def test_a_stand_in_can_still_be_asked_and_copied_like_any_object() -> None:
    stand_in = Placeholder("Linear", [1])

    assert not hasattr(stand_in, "shape")
    assert not hasattr(stand_in, "__len__")
    assert repr(copy.deepcopy(stand_in)) == repr(stand_in)
