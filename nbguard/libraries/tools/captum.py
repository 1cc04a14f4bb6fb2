"""Captum, whose attributions have the model that they explain."""

from __future__ import annotations

from nbguard.libraries import Detail, Library

LIBRARY = Library(
    name="Captum",
    packages=("captum",),
    details={("captum.attr._utils.attribution", "Attribution"): (Detail(path=("forward_func",)),)},
)
