"""The command that looks for leaks and slow lines in the source of scripts and notebooks."""

from __future__ import annotations

import argparse

import nbguard
from nbguard.frontend.cli.terminal import say, show, show_result

FORMATS = ("text", "json", "github", "sarif")
"""Forms of the output."""


def codes(text: str) -> list[str]:
    """Read codes of rules, or their beginnings, with commas between them."""
    return [code for code in text.replace(" ", "").split(",") if code]


def lint(options: argparse.Namespace) -> int:
    """Look at scripts and notebooks; return 1 where there are findings, 2 where a file cannot be used."""
    from nbguard.training.lint.lint import lint as looked
    from nbguard.training.lint.lint import selected
    from nbguard.training.lint.report import as_github, as_sarif
    from nbguard.training.lint.rules import RULES

    report, errors = looked(options.files, selected(options.select or (), options.ignore or ()), fix=options.fix)
    if options.output_format == "github":
        show(as_github(report), end="\n" if report.findings else "")
    elif options.output_format == "sarif":
        show(as_sarif(report, nbguard.__version__, {rule.code: (rule.name, rule.description) for rule in RULES}))
    else:
        show_result(report, as_json=options.output_format == "json")
    for line in (*errors, *report.left_out):
        say(line)
    return 2 if errors else int(bool(report.findings))
