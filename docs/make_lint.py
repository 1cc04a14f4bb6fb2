"""The table of rules in docs/guide/lint.md, made from the rules of the linter: python docs/make_lint.py writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from nbguard.training.lint.program import Rule
from nbguard.training.lint.rules import MODULES

PAGE = Path(__file__).resolve().parent / "guide" / "lint.md"
_MARK = re.compile(r"<!-- rules -->\n.*<!-- end -->", re.DOTALL)


def page() -> str:
    """Return the page with its rules made anew."""
    return _MARK.sub(lambda _: f"<!-- rules -->\n{rules()}\n<!-- end -->", PAGE.read_text(encoding="utf-8"))


def rules() -> str:
    """Return a section for each module of rules, with the rules in it."""
    sections = []
    for module in MODULES:
        title, _, rest = " ".join((module.__doc__ or "").split()).partition(". ")
        own = sorted((each for each in vars(module).values() if isinstance(each, Rule)), key=lambda rule: rule.code)
        sections += [f"## {title}\n", f"{rest[0].upper()}{rest[1:]}\n", *map(_rule, own)]
    return "\n".join(sections).rstrip()


def _rule(rule: Rule) -> str:
    where = " In notebooks." if rule.in_notebooks_only else ""
    bad, good = (f"```text\n{lines}\n```\n" for lines in (rule.bad, rule.good))
    return f"### {rule.code} {rule.name}\n\n{rule.description}{where}\n\n{bad}\nInstead:\n\n{good}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
