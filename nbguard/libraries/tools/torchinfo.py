"""torchinfo, whose summaries are kept with the model."""

from __future__ import annotations

from nbguard.libraries import KnownLeak, Library

LIBRARY = Library(
    name="torchinfo",
    packages=("torchinfo",),
    known_leaks=(
        KnownLeak(
            package="torchinfo",
            versions=">=1.7.2,<=1.8",
            holder="torchinfo.torchinfo._cached_forward_pass",
            keeps="the last model of each class that it summed up, although `cache_forward_pass` is off",
            report="github.com/TylerYep/torchinfo/pull/395",
        ),
    ),
    emptied_by={
        ("torchinfo.torchinfo", "_cached_forward_pass"): "import torchinfo; torchinfo.torchinfo.clear_cached_forward_pass()"
    },
)
