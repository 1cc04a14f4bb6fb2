"""PEFT, whose adapters stand inside of a model of another library."""

from __future__ import annotations

from nbguard.libraries import Detail, Library

LIBRARY = Library(
    name="PEFT",
    packages=("peft",),
    distributions=("peft",),
    details={
        ("peft.peft_model", "PeftModel"): (
            Detail(path=("base_model", "model")),
            Detail(path=("base_model", "peft_config"), unit="adapter", has_names=True),
        ),
    },
)
