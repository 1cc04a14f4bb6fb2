"""Disk writes that are suppressed while tracing a fit: checkpoints, pictures, logs."""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _opened(former: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Open a file to read; writes go nowhere."""
    return former(os.devnull if set(mode) & set("wax+") else file, mode.replace("x", "w"), *args, **kwargs)


WRITES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch, "save", _nothing),
    (builtins, "open", _opened),
    *((os, name, _nothing) for name in ("remove", "unlink", "rename", "replace", "mkdir", "makedirs", "rmdir")),
    *((shutil, name, _nothing) for name in ("copy", "copy2", "copyfile", "copytree", "move", "rmtree")),
)
"""(owner, name, replacement in a trace); the replacement is called with the original function and its arguments."""
