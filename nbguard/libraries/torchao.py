"""PyTorch's own quantization, and torchao, where it lives on."""

from __future__ import annotations

from nbguard.libraries import KnownLeak, Library

LIBRARY = Library(
    name="torchao",
    packages=("torchao",),
    distributions=("torchao",),
    known_leaks=(
        KnownLeak(
            package="torch",
            versions=">=2.10",
            holder="torch.ao.quantization.fx.utils.assert_and_get_unique_device",
            keeps="each model that was prepared for quantization",
            report="github.com/pytorch/pytorch/pull/162550 brought the cache",
        ),
        KnownLeak(
            package="torchao",
            versions=">=0.14",
            holder="torchao.utils._assert_and_get_unique_device",
            keeps="each model that was prepared for quantization",
            report="github.com/pytorch/ao/pull/2983 brought the cache",
        ),
    ),
)
