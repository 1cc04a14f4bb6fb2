"""`%nbguard log`: the logs that the memory is written to after each cell."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nbguard.errors import NbguardError

if TYPE_CHECKING:
    from IPython.core.magic_arguments import MagicArgumentParser

    from nbguard.frontend.notebook.recording import CellRecording
    from nbguard.training.profiler.analysis.memory_log import MemoryLogState

_EVERY = 15.0
"""Seconds between two writings of a file for Prometheus, which is usually read every 15 to 60 seconds."""


def add_log(options: MagicArgumentParser) -> None:
    """Add the arguments of `%nbguard log`."""
    options.add_argument(
        "logs",
        nargs="*",
        metavar="LOG",
        help="csv:FILE, tensorboard:DIR, wandb, mlflow or prometheus:FILE (also several), or off (default: say what is logged)",
    )
    options.add_argument(
        "--every",
        type=float,
        default=_EVERY,
        metavar="SECONDS",
        help=f"also write files for Prometheus while cells run, at this interval in seconds ({_EVERY:g})",
    )


def logged(recording: CellRecording, options: argparse.Namespace) -> MemoryLogState:
    """Begin or end the log that a line asks for, and return its state.

    Raises:
        NbguardError: a log cannot be written to; then the earlier log goes on.
    """
    logs = tuple(text.strip("'\"") for text in options.logs)
    if not logs:
        return recording.log_state
    if "off" in logs:
        if len(logs) > 1:
            raise NbguardError("off takes nothing else, as in  %nbguard log off")
        return recording.stop_logging()
    if not options.every > 0:
        raise NbguardError("--every takes seconds above 0, as in  %nbguard log prometheus:gpu.prom --every 15")
    return recording.log(logs, options.every)
