"""Libraries with only their packages known: code in there is not the user's."""

from __future__ import annotations

from nbguard.libraries import Library

LIBRARY = Library(
    name="others",
    packages=("torchvision", "torchaudio", "torchdata", "torchmetrics", "timm", "deepspeed", "ignite"),
    distributions=("timm",),
)
