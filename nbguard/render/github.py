"""Commands of GitHub's workflows, which mark lines of a pull request."""

from __future__ import annotations


def workflow_command(kind: str, message: str, **properties: str | int) -> str:
    """Return the line that marks something, as in `::error file=train.py,line=3,title=nbguard::it ran out of memory`."""
    given = ",".join(f"{name}={_of_property(str(value))}" for name, value in properties.items())
    return f"::{kind} {given}::{_escaped(message)}"


def _of_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
