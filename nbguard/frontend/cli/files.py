"""Commands on files, that is, memory snapshots and saved profiles, and results as web pages. None of them needs PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nbguard.errors import NbguardError, ProfileFileError, SnapshotError, line_of
from nbguard.files import write_file
from nbguard.frontend.cli.terminal import progress, say, show_blocks, show_json, show_result
from nbguard.render.markup import Html, join, style_sheet, tag
from nbguard.render.result import Result
from nbguard.units import format_bytes

if TYPE_CHECKING:
    from nbguard.memory.reports.memory_map import MemoryMap
    from nbguard.training.profiler.analysis.report import FitReport

_LARGE = 32 * 1024**2
"""Least bytes of a file that is read with progress shown."""


def diagnose(options: argparse.Namespace) -> int:
    """Say of each snapshot who held its memory, why it ran out, and which settings help; return 1 where one did."""
    from nbguard.memory.snapshots.diagnosis import SnapshotDiagnosis, diagnose_snapshot

    def each(name: str) -> int:
        diagnosis: SnapshotDiagnosis = diagnose_snapshot(
            name,
            options.set,
            torch_version=options.torch,
            capacity=options.capacity,
            fraction=options.fraction,
            progress=_reading(name),
            trial_progress=progress("runs"),
        )
        _show(diagnosis, options, diagnosis.map)
        return int(bool(diagnosis.refusals))

    return _of_each(options.files, each)


def show_map(options: argparse.Namespace) -> int:
    """Show the map of each snapshot, or a moment of its history with the map of that time."""
    from nbguard.memory.snapshots.moment import snapshot_moment
    from nbguard.memory.snapshots.report import snapshot_map

    def each(name: str) -> int:
        if options.at_event is not None:
            moment = snapshot_moment(name, options.at_event, options.device, _reading(name))
            _show(moment, options, moment.map)
            return 0
        the_map = snapshot_map(name, _reading(name))
        if options.device is not None:
            the_map = the_map.only(str(options.device))
            if not the_map.names:
                raise SnapshotError(f"{name}: nothing of cuda:{options.device} is in it")
        _show(the_map, options, the_map)
        return 0

    return _of_each(options.files, each)


def diff(options: argparse.Namespace) -> int:
    """Show growth between two snapshots, or two moments of their histories."""
    from nbguard.memory.snapshots.moment import diff_of_files

    moments = options.at_event, options.and_event
    _show(diff_of_files(options.before, options.after, moments, options.device, progress("read", _LARGE)), options)
    return 0


def replay(options: argparse.Namespace) -> int:
    """Replay the trace of each snapshot; 1 where one is not reproduced in full."""
    from nbguard.memory.allocator.replay.replay import FileReplay
    from nbguard.memory.allocator.replay.replay import replay as replayed
    from nbguard.memory.allocator.snapshot.read import load_snapshot

    def each(name: str) -> int:
        snapshot = load_snapshot(name, _reading(name))
        with _about(name):
            replay = FileReplay(name, replayed(snapshot, options.torch, options.capacity, options.fraction))
        show_result(replay, as_json=options.json)
        return int(not replay.is_exact)

    return _of_each(options.files, each)


def whatif(options: argparse.Namespace) -> int:
    """Replay the trace of each snapshot under other settings."""
    from nbguard.memory.allocator.replay.view import whatif_blocks
    from nbguard.memory.allocator.replay.whatif import what_if
    from nbguard.memory.allocator.snapshot.read import load_snapshot

    def each(name: str) -> int:
        snapshot = load_snapshot(name, _reading(name))
        if not snapshot.devices:
            raise SnapshotError(f"{name}: it holds no device, so there is nothing to run again.")
        for device in snapshot.devices:
            shown = progress("runs") if not options.json else None
            with _about(name):
                result = what_if(snapshot, device, options.set, options.torch, options.capacity, options.fraction, shown)
            if options.json:
                show_json({**result.to_data(), "file": name})
            else:
                show_blocks(whatif_blocks(result, name), end="\n\n")
        return 0

    return _of_each(options.files, each)


def profile(options: argparse.Namespace) -> int:
    """Show the report of each saved profile."""

    def each(name: str) -> int:
        report = fit_report_of(name)
        with _consistent(name):
            show_result(report, as_json=options.json)
        return 0

    return _of_each(options.files, each)


def compare(options: argparse.Namespace) -> int:
    """Show the differences between two runs."""
    from nbguard.training.runs.comparing import compare as compared

    comparison = compared(options.before, options.after)
    if options.json:
        show_result(comparison, as_json=True)
    else:
        show_blocks(comparison.blocks(), where="terminal")
    return 0


def fit_report_of(name: str) -> FitReport:
    """Return the report of a saved profile.

    Raises:
        ProfileFileError: there is no such file, it is no saved profile, or it is damaged.
    """
    from nbguard.training.profiler.analysis.fit_report import build_fit_report
    from nbguard.training.profiler.files import read_observations

    observations = read_observations(name)
    with _consistent(name):
        return build_fit_report(observations)


def _reading(name: str) -> Callable[[int, int], None] | None:
    """Return the progress of reading a snapshot in a terminal; of a large one say first how full the device was."""
    shown = progress("read", _LARGE)
    if shown is not None:
        from nbguard.memory.allocator.snapshot.read import read_segments

        if (head := read_segments(name, _LARGE)) is not None:
            for device in head.devices:
                segments = [segment for segment in head.segments if segment.device == device]
                in_use = sum(block.size for segment in segments for block in segment.blocks if block.state != "inactive")
                reserved = format_bytes(sum(segment.total_size for segment in segments))
                say(
                    f"{Path(name).name}: cuda:{device} had {reserved} reserved, {format_bytes(in_use)} of it in use, at the end"
                )
    return shown


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Name the file in an error that comes after it was read: there may be several."""
    try:
        yield
    except SnapshotError as error:
        raise SnapshotError(f"{Path(name).name}: {error}") from None


@contextmanager
def _consistent(name: str) -> Iterator[None]:
    """Say that a saved profile is damaged where its report cannot be made: each field of it is right, and all of them not."""
    try:
        yield
    except NbguardError:
        raise
    except (ArithmeticError, LookupError, ValueError, RuntimeError) as error:
        where = f"{type(error).__name__} at {line_of(error)}"
        raise ProfileFileError(f"{name} cannot be read: its figures contradict each other ({where})") from None


def _of_each(names: list[str], do: Callable[[str], int]) -> int:
    """Do it for each file; a file that cannot be used is a line, and the next one's turn. Return the gravest status."""
    status = 0
    for name in names:
        try:
            status = max(status, do(name))
        except NbguardError as error:
            say(error.said("terminal"))
            status = 2
    return status


def _show(result: Result, options: argparse.Namespace, the_map: MemoryMap | None = None) -> None:
    """Print a result as text, or as JSON on one line; write its page and the picture of its map where these were asked for."""
    written = []
    if the_map is not None and options.html is not None:
        written.append(_write(options.html, page(result, limit=options.n)))
    if the_map is not None and options.svg is not None:
        from nbguard.memory.reports.map_view import map_svg

        written.append(_write(options.svg, map_svg(the_map, options.n)))
    show_result(result, as_json=options.json, limit=options.n)
    if written:
        say(f"written to {' and '.join(written)}")


def _write(file: str, text: str) -> str:
    """Write a text file and return its name."""
    try:
        write_file(file, text)
    except OSError as error:
        raise NbguardError(f"{file} cannot be written: {error.strerror}") from None
    return file


# --- A result as a web page of its own, in one file, without script, that fetches nothing.


_STYLE = style_sheet(
    """
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 14px/1.5 system-ui, sans-serif;
       background: Canvas; color: CanvasText; }
"""
)


def page(result: Result, **details: int) -> str:
    """Return the HTML document; `details` as in `Result.blocks`."""
    from nbguard.render.html import blocks_html

    title = f"nbguard: {result.label}"
    head = tag("head", Html('<meta charset="utf-8">'), tag("title", title), _STYLE)
    body = tag("body", tag("main", tag("h1", title), blocks_html(result.blocks(**details), result.label)))
    return str(join((Html("<!DOCTYPE html>\n"), tag("html", head, body, lang="en"))))
