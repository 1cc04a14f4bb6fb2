"""Pyro, which keeps the parameters of all models in one store."""

from __future__ import annotations

from nbguard.libraries import Library

LIBRARY = Library(
    name="Pyro",
    packages=("pyro",),
    distributions=("pyro-ppl",),
    emptied_by={("pyro.params.param_store", "ParamStoreDict"): "import pyro; pyro.clear_param_store()"},
)
