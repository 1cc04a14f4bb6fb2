"""The GPU section of docs/benchmarks.md, written from what a GPU day has measured, between two markers."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from typing import Any

BEGIN, END = "<!-- gpu-day:begin -->", "<!-- gpu-day:end -->"
NOT_MEASURED = "**fake runtime: not a measurement**"

Json = dict[str, Any]


def text(device: Json, figures: Json | None, recordings: Sequence[Json], outputs: dict[str, str], *, dry: bool) -> str:
    """Return the section with its markers.

    Args:
        device: what `device.look()` found.
        figures: what `bench.py` wrote, or None if it did not end well.
        recordings: the recordings that were made.
        outputs: title and printed figures of the other benchmarks that ran.
        dry: on the fake runtime.
    """
    lines = [BEGIN, "## On a GPU", ""]
    if dry:
        lines += [NOT_MEASURED, ""]
    lines += [_where(device), ""]
    if figures is not None:
        lines += [*_timings(figures), "", _waiting(figures["waiting"]), ""]
    if recordings:
        lines += _recorded(recordings)
    for title, output in outputs.items():
        is_table = "|---|" in output
        shown = [output.strip("\n")] if is_table else ["```", output.strip("\n"), "```"]
        where = "" if "GPU" in title or is_table else ", on this machine's CPU"
        lines += [f"### {title}{where}", "", *shown, ""]
    return "\n".join([*lines, END, ""])


def _where(device: Json) -> str:
    versions = device["versions"]
    major, minor = device["capability"]
    return (
        f"{device['name']} ({device['capacity'] / 1024**3:.1f} GiB, compute capability {major}.{minor}), "
        f"driver {device['driver'] or 'unknown'}, torch {versions['torch']}, CUDA {versions['cuda']}, "
        f"Python {versions['python']}, fastai {versions['fastai'] or 'not installed'}, "
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}. Written by `make gpu-day`."
    )


def _timings(figures: Json) -> list[str]:
    counts = list(figures["timings"])
    lines = [
        f"Medians of {figures['rounds']} rounds, among {figures['objects']:,} objects tracked by gc.",
        "",
        "| storages | " + " | ".join(f"{int(count):,}" for count in counts) + " |",
        "|---|" + "---|" * len(counts),
    ]
    ours = ""
    for name in figures["timings"][counts[0]]:
        cells = []
        if name.startswith(("report", "release")):
            ours = name
        for count in counts:
            found = figures["timings"][count]
            ratio = "" if name == ours else f" (nbguard takes {_ratio(found[ours] / found[name])} ×)"
            cells.append(f"{found[name] * 1000:,.2f} ms{ratio}")
        lines.append(f"| {f'**`{name}`**' if name == ours else f'`{name}`'} | " + " | ".join(cells) + " |")
    return lines


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _waiting(found: Json) -> str:
    times = f"took {found['report'] * 1000:,.1f} ms beside a kernel of {found['kernel'] * 1000:,.0f} ms"
    if found["runs_on"]:
        return f"`report()` does not wait for the GPU: it {times}, which was still running when it returned."
    return f"Whether `report()` waits for the GPU is not shown: it {times}, which had ended when it returned."


def _recorded(recordings: Sequence[Json]) -> list[str]:
    contexts = [context for recording in recordings if (context := context_bytes(recording)) is not None]
    workspaces = [found for recording in recordings if (found := recording["afterwards"]["cublas_workspaces"])]
    lines = []
    if contexts:
        lines.append(f"CUDA's context in a process before its first allocation: {_mib(statistics.median(contexts))} (median).")
    if workspaces:
        lines.append(f"cuBLAS workspaces: {_mib(min(workspaces))} to {_mib(max(workspaces))} where there are any.")
    lines += [
        "",
        "| recorded (`tests/data/gpu`) | events | peak allocated | peak reserved |",
        "|---|---|---|---|",
    ]
    for recording in recordings:
        stats = recording["memory_stats"]
        peaks = (_mib(stats[f"{kind}_bytes.all.peak"]) for kind in ("allocated", "reserved"))
        words = recording["what"] + (f"; `{recording['settings']}`" if recording["settings"] else "")
        lines.append(f"| {recording['name']}: {words} | {len(recording['device_traces'][0]):,} | " + " | ".join(peaks) + " |")
    return [*lines, ""]


def context_bytes(recording: Json) -> int | None:
    """Return what the driver counts as used on the device more than before this process opened its context."""
    before, after = recording["context"]["nvml_before"], recording["context"]["nvml"]
    return None if before is None or after is None else int(after["used"] - before["used"])


def _mib(nbytes: float) -> str:
    return f"{nbytes / 1024**2:,.1f} MiB"


def placed(document: str, section: str) -> str:
    """Return `document` with `section` in place of what its markers enclose, or at its end where it has none."""
    head, found, rest = document.partition(BEGIN)
    if not found:
        return document.rstrip("\n") + "\n\n" + section
    return head + section.rstrip("\n") + rest.partition(END)[2]
