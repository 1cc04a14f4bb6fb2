"""What `%gpumem` does with the allocator's history and with snapshot files: record, snapshot, load, diff, whatif."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from nbguard.notebook.magics.command_line import guarded, show

if TYPE_CHECKING:
    from IPython.core.magic_arguments import MagicArgumentParser

    from nbguard.reports.memory_map import MemoryMap

_LARGE = 32 * 1024**2
"""From this size on, reading a file shows how far it is."""

WORDS = "record on|off | snapshot FILE | load FILE | diff A B | whatif"
HELP = (
    "keep the allocator's history; write a memory snapshot that pytorch.org/memory_viz opens, with names beside it; report on "
    "one; what grew between two; the recorded run under other settings"
)


def add_options(options: MagicArgumentParser) -> None:
    """Add the options of these words to those of `%gpumem`."""
    options.add_argument("--file", metavar="FILE", help="with map, whatif: of this snapshot instead of this kernel")
    options.add_argument(
        "--set",
        action="append",
        nargs="+",
        metavar="CONF",
        help="with whatif: settings to try, as in PYTORCH_ALLOC_CONF; may be repeated",
    )
    options.add_argument("--torch", metavar="VERSION", help="with whatif --file: the PyTorch that recorded it, such as 2.13")
    options.add_argument("--capacity", metavar="SIZE", help="with whatif: memory to try it on, such as 16GiB")
    options.add_argument("--fraction", type=float, metavar="X", help="with whatif: share of it that the process may take")
    options.add_argument("--entries", type=int, metavar="N", help="with record on: entries to keep of each device (100000)")


def refuse_options(options: argparse.Namespace) -> None:
    """Raise UsageError for an option that goes with another word."""
    word = options.what[0] if options.what else ""
    if options.file is not None and word not in ("map", "whatif"):
        raise UsageError("%gpumem: --file goes with map and whatif, as in  %gpumem map --file before.pickle")
    for name in ("set", "torch", "capacity", "fraction"):
        if getattr(options, name) is not None and word != "whatif":
            raise UsageError(f"%gpumem: --{name} goes with whatif, as in  %gpumem whatif --{name} …")
    if options.entries is not None and options.what != ["record", "on"]:
        raise UsageError("%gpumem: --entries goes with record on, as in  %gpumem record on --entries 500000")


def run(shell: Any, options: argparse.Namespace) -> Any:
    """Do what the words say, and show what comes of it."""
    words = [_unquoted(word) for word in options.what]
    match words:
        case ["record"] | ["record", "on" | "off"]:
            return show(shell, options, guarded("%gpumem record", _record, words[1:], options.entries))
        case ["snapshot", file]:
            from nbguard.snapshots.save import save_snapshot

            return show(shell, options, guarded("%gpumem snapshot", save_snapshot, file))
        case ["load", file]:
            from nbguard.snapshots.report import snapshot_report

            found = guarded("%gpumem load", snapshot_report, file, _progress())
            return show(shell, options, _only(found, options), limit=options.n)
        case ["diff", before, after]:
            from nbguard.snapshots.diff import snapshot_diff

            return show(shell, options, guarded("%gpumem diff", snapshot_diff, before, after, _progress()), limit=options.n)
        case ["whatif"]:
            return show(shell, options, guarded("%gpumem whatif", _whatif, **_what_to_try(options)))
    raise UsageError(_USAGE[words[0]])


def map_of(file: str) -> MemoryMap:
    """Return the map of a snapshot file, whose reading shows how far it is."""
    from nbguard.snapshots.report import snapshot_map

    return snapshot_map(_unquoted(file), _progress())


_USAGE = {
    "record": "%gpumem record: say on or off, as in  %gpumem record on",
    "snapshot": "%gpumem snapshot: give one file to write, as in  %gpumem snapshot before.pickle",
    "load": "%gpumem load: give one file, as in  %gpumem load before.pickle",
    "diff": "%gpumem diff: give two files, the earlier one first, as in  %gpumem diff before.pickle after.pickle",
    "whatif": "%gpumem whatif: takes no words; a file goes behind --file, settings behind --set",
}


def _record(words: list[str], entries: int | None) -> Any:
    from nbguard.cleanup.apply.allocator_history import recording, start, stop
    from nbguard.memory.recording import DEFAULT_ENTRIES

    match words:
        case ["on"]:
            return start(DEFAULT_ENTRIES if entries is None else entries)
        case ["off"]:
            return stop()
    return recording()


def _whatif(**what: Any) -> Any:
    from nbguard.snapshots.whatif import whatif_report

    return whatif_report(**what, progress=_progress())


def _what_to_try(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of whatif as `whatif_report` takes them; UsageError for one that means nothing."""
    from nbguard.allocator.model.policy import parse_version
    from nbguard.units import parse_bytes

    try:
        capacity = None if options.capacity is None else parse_bytes(options.capacity)
        if options.torch is not None:
            parse_version(options.torch)
    except ValueError as error:
        raise UsageError(f"%gpumem whatif: {error}") from None
    if options.fraction is not None and not 0 < options.fraction <= 1:
        raise UsageError(f"%gpumem whatif: {options.fraction} is no share; write it as 0.5")
    return {
        "path": None if options.file is None else _unquoted(options.file),
        "confs": [",".join(map(_unquoted, conf)) for conf in options.set or ()],
        "device": _number(options.device),
        "torch_version": options.torch,
        "capacity": capacity,
        "fraction": options.fraction,
    }


def _number(device: str | None) -> int | None:
    if device is None:
        return None
    digits = device.removeprefix("cuda:")
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError(f"%gpumem whatif: no device {device}; write it as 1, or cuda:1")
    return int(digits)


def _only(found: Any, options: argparse.Namespace) -> Any:
    """Return what a file says of the device that was asked for."""
    if options.device is None:
        return found
    from dataclasses import replace

    report = found.report.only(options.device)
    if not report.devices:
        have = ", ".join(each.device for each in found.report.devices) or "none"
        raise UsageError(f"%gpumem load: no device {options.device} in {found.file}; there is: {have}")
    return replace(found, report=report)


def _unquoted(word: str) -> str:
    """Return a word without the quotes around it, which the line's reader leaves in place."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _progress() -> Callable[[int, int], None]:
    """Return what shows under the cell how far the reading of a large file is."""
    from nbguard.units import format_bytes

    last = [-1]

    def progress(done: int, total: int) -> None:
        percent = done * 100 // max(total, 1)
        if total >= _LARGE and percent >= last[0] + 10:
            last[0] = percent
            sys.stderr.write(f"\rread {format_bytes(done)} of {format_bytes(total)} ")

    return progress
