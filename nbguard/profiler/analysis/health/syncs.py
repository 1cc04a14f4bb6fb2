"""Hidden synchronisations: lines that wait for the device in every batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nbguard.profiler.analysis.report import FitFinding

_ENOUGH = 3
_LOOP = 16
"""Reads of a function in a batch from which on it goes through a tensor value by value."""
_SHARE = 0.05
"""Of a step, what waiting at one line must take to be worth changing."""
SAME_TENSOR = "copy of the same tensor"
"""Stands for a method where a line copies the tensor to the device that it has copied in an earlier batch."""
_READS = {"__bool__": "`if`", "__float__": "`float()`", "__int__": "`int()`", "__index__": "an index"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSite:
    """One line, or something of fastai's or torch's own, that reads values of tensors in training batches."""

    where: str  # e.g. "In[5], line 8"
    own: str  # a callback of fastai's, `GradScaler`; empty: it is the user's line
    methods: tuple[str, ...]  # that read there, e.g. "item", "__bool__"
    calls: int  # in all batches that were looked at
    batches: int  # in how many batches
    waited: int | None  # nanoseconds in all; None: in host memory, where nothing waits
    file: str = ""  # of the line, as in `StackLine`
    function: str = ""  # that the line is in, without classes and functions around it


@dataclass(frozen=True, slots=True)
class SyncFacts:
    """All such lines, and how many training batches were looked at."""

    sites: tuple[SyncSite, ...] = ()  # by line
    batches: int = 0


def sync_findings(facts: SyncFacts, step: int | None = None, gainable: int | None = None) -> tuple[FitFinding, ...]:
    """Return the lines of the user's that wait in at least every other batch, the longest first.

    Args:
        facts: lines and their times.
        step: nanoseconds of a batch.
        gainable: nanoseconds of a batch that can be saved at all: to wait for a GPU that is at work costs nothing.
    """
    often = [site for site in facts.sites if not site.own and site.batches >= _ENOUGH and site.batches * 2 >= facts.batches]
    often.sort(key=lambda site: (-(site.waited or 0), -site.calls))
    return tuple(
        _copied(site, facts.batches, step, gainable)
        if site.methods == (SAME_TENSOR,)
        else _finding(site, facts.batches, step, gainable)
        for site in often
    )


def reading_loops(facts: SyncFacts) -> frozenset[tuple[str, str]]:
    """Return the file and name of each function of the user's that reads many values in each batch: it loops over a tensor."""
    calls: Counter[tuple[str, str]] = Counter()
    for site in facts.sites:
        if site.function and site.methods != (SAME_TENSOR,) and site.batches * 2 >= facts.batches:
            calls[site.file, site.function] += site.calls // max(site.batches, 1)
    return frozenset(function for function, count in calls.items() if count >= _LOOP)


def copied_time(facts: SyncFacts) -> int:
    """Return the nanoseconds per batch in which lines copy the same tensors to the device again."""
    sites = (site for site in facts.sites if site.methods == (SAME_TENSOR,))
    return sum(site.waited or 0 for site in sites) // max(facts.batches, 1)


def _lost(time: int, gainable: int | None) -> int:
    return time if gainable is None else min(time, gainable)


def _copied(site: SyncSite, batches: int, step: int | None, gainable: int | None) -> FitFinding:
    time = (site.waited or 0) // batches
    lost = _lost(time, gainable)
    is_worth_it = step is None or lost >= _SHARE * step
    return FitFinding(
        kind="copy",
        severity="advice" if is_worth_it else "note",
        what=f"{site.where} copies the same tensor to the GPU in every batch",
        evidence=f"{site.calls} times in {batches} training batches; {time / 1e6:.2f} ms per batch",
        change="copy it once, before the loop; if it belongs to a model, `register_buffer` makes it move with the model",
        time=lost,
    )


def _finding(site: SyncSite, batches: int, step: int | None, gainable: int | None) -> FitFinding:
    time = None if site.waited is None else site.waited // batches
    is_emptying = set(site.methods) == {"empty_cache"}
    how_often = "every batch" if site.batches == batches else f"{site.batches} of {batches} batches"
    reads = ", ".join(_READS.get(method, f"`.{method}()`") for method in site.methods)
    evidence = f"{reads}: {site.calls} times in {batches} training batches ({site.calls / batches:.3g} per batch)"
    if time is None:
        evidence += "; where the tensor is on a GPU, each waits for it"
    else:
        evidence += f"; {time / 1e6:.2f} ms per batch are waited there"
    if set(site.methods) == {"synchronize"}:
        change = "remove the call, because a fit needs none; to time something, use `torch.cuda.Event(enable_timing=True)`"
    elif is_emptying:
        change = (
            "remove the call; without it the allocator keeps the memory for the next batch, which "
            "otherwise has to ask the driver again"
        )
    else:
        change = "leave it on the device and read it once per epoch or every 50th batch; for a loss, keep `loss.detach()`"
    lost = None if time is None else _lost(time, gainable)
    is_worth_it = lost is not None and step is not None and lost >= _SHARE * step
    what = f"{site.where} {'waits for the GPU' if time is not None else 'reads a value of a tensor'} in {how_often}"
    if is_emptying:
        what = f"{site.where} empties the allocator's cache in {how_often}"
    return FitFinding(
        kind="cache" if is_emptying else "sync",
        severity="advice" if is_worth_it else "note",
        what=what,
        evidence=evidence,
        change=change,
        time=lost,
    )
