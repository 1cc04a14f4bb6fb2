"""The rules of the linter, by code. A rule is silent where it cannot be sure."""

from __future__ import annotations

from nbguard.training.lint.program import Rule
from nbguard.training.lint.rules import evaluation, graphs, holders, steps, waits

MODULES = (graphs, holders, evaluation, waits, steps)
"""The modules of the rules. A module's rules share the first digit of their codes."""

RULES: tuple[Rule, ...] = tuple(
    sorted((each for module in MODULES for each in vars(module).values() if isinstance(each, Rule)), key=lambda rule: rule.code)
)
"""All rules, by code."""
