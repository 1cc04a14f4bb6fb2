"""Following printed advice in a kernel: each line is run as it stands, and must give back what it says."""

from __future__ import annotations

import re

from tests.kernels import Kernel

_LOOK = "__import__('sys').modules['nbguard.scan.scan']"
_GRAPH = f"{_LOOK}.scan({_LOOK}.Notebook(get_ipython(), get_ipython().user_ns)).facts.graph"
_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def follow(kernel: Kernel, command: str) -> int:
    """Run the lines of a command and return the bytes that tensors hold less than before."""
    before = held(kernel)
    for line in command.splitlines():
        kernel.run(line).ok()
    kernel.run_silently("__import__('gc').collect()")
    return before - held(kernel)


def held(kernel: Kernel) -> int:
    """Return the bytes that all tensors hold."""
    nbytes: int = kernel.value(f"sum(storage.nbytes for storage in {_GRAPH}.storages)")
    return nbytes


def promised(sentence: str) -> float:
    """Return the first amount of bytes that a sentence names; it is rounded to hundredths of its unit."""
    amount = re.search(r"(?:frees |of )(\d+(?:\.\d+)?) ([KMG]?i?B)", sentence)
    assert amount is not None, sentence
    return float(amount[1]) * _UNITS[amount[2]]


def follow_finding(kernel: Kernel, finding: tuple[str, str]) -> None:
    """Run a finding's command: it frees what the sentence says, to the hundredth that it shows."""
    sentence, command = finding
    expected = promised(sentence.partition("`")[2].partition("`")[2] if "frees" in sentence else sentence)
    freed = follow(kernel, command)
    assert abs(freed - expected) <= 0.005 * 1024**2, (sentence, command, freed)
