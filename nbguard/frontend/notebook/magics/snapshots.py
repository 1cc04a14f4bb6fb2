"""The words of `%gpumem` about the allocator's history and snapshot files, such as record, snapshot, load, diff, whatif."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from nbguard.frontend.arguments import add_device, add_rows, add_trials, add_two_snapshots, device_number, unquoted
from nbguard.frontend.grammar import Word
from nbguard.frontend.notebook.magics.command_line import MagicGrammar, guarded, show
from nbguard.frontend.notebook.session import session_of
from nbguard.units import format_bytes

if TYPE_CHECKING:
    from nbguard.frontend.notebook.session_memory import SessionMemory
    from nbguard.memory.reports.memory_map import MemoryMap
    from nbguard.memory.simulation.simulation import Simulation


def _add_record(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "state",
        nargs="?",
        choices=["on", "off"],
        metavar="on|off",
        help="start or stop (default: say whether it is being recorded)",
    )
    options.add_argument("--entries", type=int, metavar="N", help="with on: entries to keep of each device (100000)")


def _add_file(options: argparse.ArgumentParser) -> None:
    options.add_argument("file", metavar="FILE", type=unquoted, help="the file, in quotes where its name has blanks")


def _add_load(options: argparse.ArgumentParser) -> None:
    _add_file(options)
    add_device(options)
    add_rows(options)


def _add_whatif(options: argparse.ArgumentParser) -> None:
    options.add_argument("--file", metavar="FILE", type=unquoted, help="of this snapshot instead of this kernel")
    add_trials(options, nargs="+")  # a line's words end at commas
    add_device(options)


WORDS = {
    "record": Word(
        usage="record on|off",
        help="keep the allocator's history",
        advice="say on or off, as in  %gpumem record on",
        add=_add_record,
    ),
    "snapshot": Word(
        usage="snapshot FILE",
        help="write a memory snapshot for pytorch.org/memory_viz, and its names to a second file",
        advice="give one file to write, as in  %gpumem snapshot before.pickle",
        add=_add_file,
    ),
    "load": Word(
        usage="load FILE", help="report on a snapshot", advice="give one file, as in  %gpumem load before.pickle", add=_add_load
    ),
    "diff": Word(
        usage="diff BEFORE AFTER",
        help="growth between two snapshots, or two moments of their histories",
        advice="give two files, the earlier one first, as in  %gpumem diff before.pickle after.pickle",
        add=add_two_snapshots,
    ),
    "whatif": Word(
        usage="whatif",
        help="the recorded run under other settings",
        advice="takes no words; give a file after --file and settings after --set",
        add=_add_whatif,
    ),
}


def run(shell: Any, options: argparse.Namespace, grammar: MagicGrammar) -> Any:
    """Carry out the line, and show the result."""
    simulation = session_of(shell).memory.simulation
    match options.word:
        case "record":
            if options.entries is not None and options.state != "on":
                grammar.misused("record", "--entries needs record on, as in  %gpumem record on --entries 500000")
            return show(shell, options, guarded("%gpumem record", _record, options.state, options.entries, simulation))
        case "snapshot":
            from nbguard.memory.snapshots.save import save_snapshot

            return show(shell, options, guarded("%gpumem snapshot", save_snapshot, options.file, simulation=simulation))
        case "load":
            from nbguard.memory.snapshots.report import snapshot_report

            saved = guarded("%gpumem load", snapshot_report, options.file, _progress())
            return show(shell, options, _only(saved, options), limit=options.n)
        case "diff":
            from nbguard.memory.snapshots.moment import diff_of_files

            moments = options.at_event, options.and_event
            grown = guarded("%gpumem diff", diff_of_files, options.before, options.after, moments, options.device, _progress())
            return show(shell, options, grown, limit=options.n)
        case _:
            return show(shell, options, guarded("%gpumem whatif", _whatif, **_what_to_try(options), simulation=simulation))


def map_of(file: str) -> MemoryMap:
    """Return the map of a snapshot file, whose reading shows how far it is."""
    from nbguard.memory.snapshots.report import snapshot_map

    return snapshot_map(file, _progress())


def show_moment(shell: Any, options: argparse.Namespace, memory: SessionMemory) -> Any:
    """Show a moment of the recorded history, of this kernel or of a file; with `--history` also a slider to all others."""
    from nbguard.memory.snapshots.moment import RecordedHistory

    if options.request is not None:
        raise UsageError("%gpumem map: --request is about this moment; leave out --history and --at")
    device = _number(options.device, "map")
    if options.file is None:
        history = guarded("%gpumem map", memory.recorded_history)
    else:
        history = guarded("%gpumem map", RecordedHistory.load, options.file, _progress())
    moment = guarded("%gpumem map", history.at, "peak" if options.at_event is None else options.at_event, device)
    if not options.history:
        return show(shell, options, moment, limit=options.n)
    if len(moment.devices) > 1:
        have = ", ".join(each.device for each in moment.devices)
        raise UsageError(f"%gpumem map --history: its devices have a history each ({have}); choose one with --device")
    widget = None
    if hasattr(shell, "kernel") and not options.json:
        from nbguard.frontend.notebook.history_slider import slider_bundle

        widget = slider_bundle(history, moment, options.n)
    return show(shell, options, moment, widget, limit=options.n)


def _record(state: str | None, entries: int | None, simulation: Simulation | None) -> Any:
    from nbguard.memory.cleanup.apply.allocator_history import recording, start, stop
    from nbguard.memory.core.recording import DEFAULT_ENTRIES

    if simulation is not None:
        kept = DEFAULT_ENTRIES if entries is None else entries
        return simulation.recording if state is None else simulation.record(state == "on", kept)
    match state:
        case "on":
            return start(DEFAULT_ENTRIES if entries is None else entries)
        case "off":
            return stop()
    return recording()


def _whatif(**what: Any) -> Any:
    from nbguard.memory.snapshots.whatif import whatif_report

    return whatif_report(**what, progress=_progress())


def _what_to_try(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of whatif as `whatif_report` takes them; UsageError for one that means nothing."""
    return {
        "path": options.file,
        "confs": [",".join(conf) for conf in options.set],
        "device": _number(options.device, "whatif"),
        "torch_version": options.torch,
        "capacity": options.capacity,
        "fraction": options.fraction,
    }


def _number(device: str | None, word: str) -> int | None:
    try:
        return None if device is None else device_number(device)
    except argparse.ArgumentTypeError:
        raise UsageError(f"%gpumem {word}: no device {device}; write it as 1, or cuda:1") from None


def _only(saved: Any, options: argparse.Namespace) -> Any:
    """Return the report of a file on the device that was asked for."""
    if options.device is None:
        return saved
    from dataclasses import replace

    report = saved.report.only(options.device)
    if not report.devices:
        have = ", ".join(device.device for device in saved.report.devices) or "none"
        raise UsageError(f"%gpumem load: no device {options.device} in {saved.file}; there is: {have}")
    return replace(saved, report=report)


def _progress() -> Callable[[int, int], None]:
    """Return a function that reports how far the reading of a file is."""
    from nbguard.memory.scan.progress import stage

    return lambda done, total: stage(f"reading: {format_bytes(done)} of {format_bytes(total)}")
