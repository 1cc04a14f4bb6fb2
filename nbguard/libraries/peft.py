"""PEFT, whose adapters stand inside of a model of another library."""

from __future__ import annotations

from nbguard.libraries import Detail, KnownLeak, Library

_WARNED = (("shira", ">=0.20"), ("supertuning", ">=0.21"))
"""Tuners that warn once for each layer, by a cache of a function that gets the layer: (folder, versions)."""

LIBRARY = Library(
    name="PEFT",
    packages=("peft",),
    distributions=("peft",),
    known_leaks=tuple(
        KnownLeak(
            package="peft",
            versions=versions,
            holder=f"peft.tuners.{tuner}.layer._warn_once_about_module_hooks",
            keeps="the adapted layers of each model that ran",
            report="docs/guide/known-leaks.md has a reproduction",
        )
        for tuner, versions in _WARNED
    ),
    details={
        ("peft.peft_model", "PeftModel"): (
            Detail(path=("base_model", "model")),
            Detail(path=("base_model", "peft_config"), unit="adapter", has_names=True),
        ),
    },
)
