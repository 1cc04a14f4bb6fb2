"""Optuna, whose study keeps the attributes of its trials."""

from __future__ import annotations

from nbguard.libraries import Detail, Library

LIBRARY = Library(
    name="Optuna",
    packages=("optuna", "optuna_integration"),
    details={("optuna.study.study", "Study"): (Detail(path=("_storage", "_studies", 0, "trials"), unit="trial"),)},
)
