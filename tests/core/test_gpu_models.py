"""Models of GPUs by the names that people give them."""

from __future__ import annotations

import pytest

from nbguard.memory.core.gpu_models import MODELS, gpu_model, gpu_size


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t4", "T4"),
        ("3060", "RTX3060"),
        ("rtx 3060", "RTX3060"),
        ("RTX 4070 Ti SUPER", "RTX4070TISUPER"),
        ("1080 ti", "GTX1080TI"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("A100 80GB", "A100-80GB"),
        ("7900xtx", "RX7900XTX"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_model_is_known_by_the_names_that_people_write(text: str, name: str) -> None:
    model = gpu_model(text)

    assert model is not None
    assert (model.name, gpu_size(text)) == (name, model.capacity)


def test_each_model_is_known_by_its_own_name() -> None:
    assert [gpu_model(model.name) for model in MODELS] == list(MODELS)


def test_a_size_is_one_and_a_misspelt_name_has_its_like() -> None:
    assert gpu_size("16 GiB") == 16 << 30
    with pytest.raises(ValueError, match="RTX3060"):
        gpu_size("RTX3O60")
    with pytest.raises(ValueError, match="16GiB"):
        gpu_size("16")
    with pytest.raises(ValueError, match="as in 16GiB"):
        gpu_size("toaster")
