"""Pyro, which keeps the parameters of all models in one store."""

from __future__ import annotations

from nbguard.libraries import Library

LIBRARY = Library(
    name="Pyro",
    packages=("pyro",),
    distributions=("pyro-ppl",),
    single_optimizer=(
        "pyro.optim.optim",
        "for modules, call `elbo = Trace_ELBO()(model, guide)` once and step `torch.optim.Adam(elbo.parameters())`",
    ),
    emptied_by={("pyro.params.param_store", "ParamStoreDict"): "import pyro; pyro.clear_param_store()"},
)
