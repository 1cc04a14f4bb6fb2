"""The command line: `nbguard enable|disable|status`, `doctor`, `predict SCRIPT`, `replay|whatif|profile FILE…`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbguard.errors import NbguardError
from nbguard.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from nbguard.allocator.snapshot.snapshot import Snapshot
    from nbguard.profiler.analysis.observations import FitObservations

_LARGE = 32 * 1024**2
"""Bytes of a file from which on reading it shows progress."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    0 is success, 1 a replay that is not exact or a fit that may not fit, 2 a file or an option that cannot be used.
    `doctor --strict` returns 1 where the gravest finding is a piece of advice, and 3 where it is a problem.
    """
    options = _parser().parse_args(arguments)
    if "change" in options:
        return _startup(options)
    if "script" in options:
        return _predict(options)
    if "target" in options:
        return _doctor(options)
    status = 0
    for name in options.files:
        try:
            status = max(status, options.run(name, options.load(name), options))
        except NbguardError as error:
            print(f"nbguard: {error}", file=sys.stderr)
            status = 2
        except BrokenPipeError:
            return 2
    return status


def _startup(options: argparse.Namespace) -> int:
    """Have nbguard loaded in every notebook, or no longer, and say how it is."""
    from nbguard.notebook import startup

    try:
        print(getattr(startup, options.change)(options.profile).sentence)
    except NbguardError as error:
        print(f"nbguard: {error}", file=sys.stderr)
        return 2
    return 0


def _predict(options: argparse.Namespace) -> int:
    """Foresee the first fit of a script; return 0 where it fits or no GPU was named, 1 where it does not or may not."""
    try:
        from nbguard.prediction.script import predict_script
    except ImportError:
        print("nbguard: PyTorch is not installed here: there is no fit to foresee", file=sys.stderr)
        return 2
    from nbguard.render.text import blocks_text

    try:
        found = predict_script(options.script, options.gpu, options.settings, options.bs)
    except NbguardError as error:
        print(f"nbguard: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_data()) if options.json else blocks_text(found.blocks()), flush=True)
    return int(any(fit.prediction.capacity is not None and not fit.prediction.fits for fit in found.fits))


_TOPICS = ("environment", "determinism", "export")
_STATUS = {"problem": 3, "advice": 1}
"""Exit status of `doctor --strict` by the severity of its gravest finding; a note is no reason to fail."""


def _doctor(options: argparse.Namespace) -> int:
    """Diagnose this environment, and what a script makes. PyTorch is imported, unless that would end the process."""
    from nbguard.doctor.diagnose import diagnose
    from nbguard.doctor.diagnose_launch import diagnose_launch
    from nbguard.doctor.target import import_torch, made_by
    from nbguard.render.text import blocks_text

    try:
        import_torch()
        if options.ranks or options.self_test:
            diagnosis = diagnose_launch(self_test=options.self_test)
        else:
            subject, batch = made_by(options.target) if options.target else (None, None)
            topics = options.topics or _TOPICS
            chosen = {topic: topic in topics for topic in _TOPICS}
            diagnosis = diagnose(subject, batch, **chosen)  # type: ignore[arg-type]
    except NbguardError as error:
        print(f"nbguard: {error}", file=sys.stderr)
        return 2
    print(json.dumps(diagnosis.to_data()) if options.json else blocks_text(diagnosis.blocks()), flush=True)
    return _STATUS.get(diagnosis.worst or "", 0) if options.strict else 0


def _replay(name: str, snapshot: Snapshot, options: argparse.Namespace) -> int:
    from nbguard.allocator.replay.data import file_replay_data
    from nbguard.allocator.replay.replay import replay
    from nbguard.allocator.replay.view import replay_blocks
    from nbguard.render.text import blocks_text

    replays = replay(snapshot, options.torch, options.capacity, options.fraction)
    print(
        json.dumps(file_replay_data(name, replays)) if options.json else blocks_text(replay_blocks(name, replays)), flush=True
    )
    return 0 if all(device.is_exact for device in replays) else 1


def _whatif(name: str, snapshot: Snapshot, options: argparse.Namespace) -> int:
    from nbguard.allocator.replay.data import whatif_data
    from nbguard.allocator.replay.view import whatif_blocks
    from nbguard.allocator.replay.whatif import what_if
    from nbguard.render.text import blocks_text

    for device in snapshot.devices:
        progress = _show("runs") if not options.json else None
        result = what_if(snapshot, device, options.set, options.torch, options.capacity, options.fraction, progress=progress)
        if options.json:
            print(json.dumps({"file": name, **whatif_data(result)}), flush=True)
        else:
            print(blocks_text(whatif_blocks(result, name)), end="\n\n", flush=True)
    return 0


def _profile(_name: str, observations: FitObservations, options: argparse.Namespace) -> int:
    from nbguard.profiler.analysis.fit_report import build_fit_report
    from nbguard.render.text import blocks_text

    report = build_fit_report(observations)
    print(json.dumps(report.to_data()) if options.json else blocks_text(report.blocks()), flush=True)
    return 0


def _load_profile(name: str) -> FitObservations:
    from nbguard.profiler.files import read_observations

    return read_observations(name)


def _load_snapshot(name: str) -> Snapshot:
    from nbguard.allocator.snapshot.read import load_snapshot

    return load_snapshot(name, _show("read", _LARGE))


def _show(what: str, least: int = 1) -> _Progress | None:
    """Return a display of progress for a terminal; None where the output is no terminal."""
    return _Progress(what, least) if sys.stderr.isatty() else None


class _Progress:
    def __init__(self, what: str, least: int) -> None:
        self.what, self.least = what, least

    def __call__(self, done: int, total: int) -> None:
        if total < self.least:
            return
        amounts = (done, total) if self.what == "runs" else (format_bytes(done), format_bytes(total))
        text = f"{self.what} {amounts[0]} of {amounts[1]}" if done < total else ""
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbguard",
        description="Loads nbguard in every notebook; foresees a script's memory; reports on recorded snapshots and profiles.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, change, help_text in (
        ("enable", "enable", "load nbguard in every notebook: one file in IPython's startup folder"),
        ("disable", "disable", "remove that file"),
        ("status", "startup", "say whether it is there, and where"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--profile", default="default", metavar="NAME", help="the IPython profile (default)")
        command.set_defaults(change=change)
    doctor = commands.add_parser("doctor", help="check this machine, and the model that a script makes")
    doctor.add_argument(
        "target", nargs="?", metavar="MODULE:NAME", help="a Learner, or a function that makes one, or a model and a batch"
    )
    for topic in _TOPICS:
        doctor.add_argument(
            f"--{topic}", dest="topics", action="append_const", const=topic, default=[], help=f"check {topic}; default: all"
        )
    doctor.add_argument("--ranks", action="store_true", help="check whether ranks of a distributed job can be launched here")
    doctor.add_argument("--self-test", action="store_true", help="with --ranks: have two processes work together")
    doctor.add_argument("--strict", action="store_true", help="exit with 1 for a piece of advice, 3 for a problem")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    replay = commands.add_parser("replay", help="replay the recorded trace and say how much of it is reproduced")
    replay.set_defaults(run=_replay, load=_load_snapshot)
    whatif = commands.add_parser("whatif", help="replay it under other settings of the allocator")
    whatif.add_argument(
        "--set", action="append", default=[], metavar="CONF", help="settings to try, as in PYTORCH_ALLOC_CONF; may be repeated"
    )
    whatif.set_defaults(run=_whatif, load=_load_snapshot)
    profile = commands.add_parser("profile", help="show the report of a fit again, from a profile saved with --save")
    profile.add_argument("files", nargs="+", metavar="FILE", help="from `%%%%profile_fit --save FILE`")
    profile.add_argument("--json", action="store_true", help="one JSON object per line; nanoseconds and bytes as integers")
    profile.set_defaults(run=_profile, load=_load_profile)
    predict = commands.add_parser("predict", help="foresee the memory of a script's first fit: it runs up to there")
    predict.add_argument("script", metavar="SCRIPT", help="a Python file that trains")
    predict.add_argument("--bs", type=_items, metavar="N", help="items of a batch, instead of the loader's")
    predict.add_argument("--gpu", metavar="NAME|SIZE", help="does it fit there: T4, A100, H100, … or 16GiB")
    predict.add_argument("--settings", metavar="CONF", help="what PYTORCH_ALLOC_CONF would say")
    predict.add_argument("--json", action="store_true", help="one JSON object; bytes as integers")
    for command in (replay, whatif):
        command.add_argument("files", nargs="+", metavar="FILE", help="from torch.cuda.memory._dump_snapshot, or as JSON")
        command.add_argument("--json", action="store_true", help="one JSON object per line; bytes as integers")
        command.add_argument("--torch", type=_version, metavar="VERSION", help="the PyTorch that recorded it, such as 2.13")
        command.add_argument("--fraction", type=_share, metavar="X", help="of it that the process might take, such as 0.5")
        command.add_argument("--capacity", type=_bytes, metavar="SIZE", help="memory of the device, such as 16GiB")
    return parser


def _version(text: str) -> str:
    from nbguard.allocator.model.policy import parse_version

    try:
        parse_version(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _items(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of items")


def _share(text: str) -> float:
    try:
        if 0 < float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no share; write it as 0.5")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
