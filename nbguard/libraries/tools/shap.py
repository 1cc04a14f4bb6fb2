"""SHAP, whose explainers have the model and the background data."""

from __future__ import annotations

from nbguard.libraries import Detail, Library

_MODEL = (Detail(path=("explainer", "model")),)

LIBRARY = Library(
    name="SHAP",
    packages=("shap",),
    details={("shap", "DeepExplainer"): _MODEL, ("shap", "GradientExplainer"): _MODEL},
)
