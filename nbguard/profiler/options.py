"""What a profile does beyond the usual."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The options of `%%profile_fit`."""

    memory: bool = False  # record two batches allocation by allocation, for the stacks behind the peak
    tune_workers: bool = False
    stop_on_nan: bool = False
    compare: bool = False  # with the last run of the same cell
    trace: str = ""  # files to write
    json: str = ""
    logs: tuple[str, ...] = ()  # e.g. "csv:FILE", "tensorboard:DIR"
