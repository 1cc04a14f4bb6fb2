"""Predictions beside fits on the fake device, one line per case: `python -m tests.prediction.compare [CASE …] [--arch 9.0]`.

Without cases it goes through all of the oracle's. `--difference` shows for each case where its sequence of allocations first
leaves that of the device, with the operators there on the one side and the lines of Python on the other: the operator without
a rule, or with a wrong one, is named there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from nbguard.training.prediction import predict as predicting
from nbguard.training.prediction.emulation.recorder import RecordingDevice
from nbguard.training.prediction.predict import predict
from tests.fake_cuda.launch import environment
from tests.fake_cuda.plugin import CHECK, fake_settings
from tests.kernels import FASTAI, Zygote
from tests.prediction.fits import make
from tests.prediction.test_oracle import CLOSE, EXACT, MIB, Measured, measure

_AROUND = 6
"""Allocations that are shown before and after the first difference."""

_ALLOCATIONS = """
import json, warnings; warnings.filterwarnings("ignore")
from tests.prediction.fits import fit, make
learn = make({case!r}, "cuda")
torch.cuda.memory._record_memory_history(max_entries=10**6, stacks="python")
fit(learn)
kept = []
for event in torch.cuda.memory._snapshot()["device_traces"][0]:
    if event["action"] == "alloc":
        lines = [f"{{f['name']}} {{f['filename'].rpartition('/')[2]}}:{{f['line']}}" for f in event["frames"][:4]]
        kept.append([event["size"], " < ".join(lines)])
print(json.dumps(kept))
"""


@contextmanager
def runner(**settings: object) -> Iterator[Callable[..., str]]:
    """Yield what runs code on the fake device, as the fixture `fake_cuda_run` does."""
    zygote = Zygote(FASTAI, environment())

    def run(code: str, *, fastai: bool = True, conf: str = "", timeout: float = 250, **more: object) -> str:
        out, errors = zygote.run(CHECK + code, fake_settings(conf, **settings, **more), timeout)
        assert out, errors[-2000:]
        return out

    try:
        yield run
    finally:
        zygote.stop()


@contextmanager
def modelled(arch: str) -> Iterator[None]:
    """Let predictions that name no GPU be those of another architecture."""
    major, minor = map(int, arch.split("."))
    former = predicting.gpu_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "gpu_of", lambda text: replace(former(text), architecture=(major, minor)))
        yield


def difference(case: str, run: Callable[..., str]) -> None:
    """Print where the allocations of a case first differ."""
    births: list[tuple[int, str]] = []
    former = RecordingDevice.born

    def born(device: Any, nbytes: int, op: Any, *, is_older: bool) -> int:
        if nbytes:
            births.append((nbytes, f"{device._current()} {op or 'a buffer'}{' (older)' if is_older else ''}"))
        return former(device, nbytes, op, is_older=is_older)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordingDevice, "born", born)
        predict(make(case, "cpu"))
    real = json.loads(run("import torch\n" + _ALLOCATIONS.format(case=case)).splitlines()[-1])
    resident = next(at for at in range(len(births)) if not births[at][1].startswith("start"))
    first = next((at for at in range(min(len(births), len(real))) if births[at][0] != real[at][0]), None)
    print(f"{case}: {len(births)} allocations predicted, {len(real)} on the device, the model's {resident} before")
    if first is None:
        return
    for at in range(max(0, first - _AROUND), first + 2 * _AROUND):
        ours, theirs = births[at] if at < len(births) else (0, ""), real[at] if at < len(real) else (0, "")
        print(f"{'>' if at == first else ' '}{at:6d} {ours[0]:11d} {ours[1]:60.60s} | {theirs[0]:11d} {theirs[1]}")


def line(case: str, run: Callable[..., str], conf: str) -> tuple[float, float]:
    """Print the line of a case and return how far off its peaks are, as shares of the real ones."""
    found, real = predict(make(case, "cpu"), settings=conf or None), measure(run, case, conf=conf)
    assert isinstance(real, Measured)
    shares = found.peak_allocated / real.allocated - 1, found.peak_reserved / real.reserved - 1
    words = "exact" if shares == (0, 0) else f"{shares[0]:+.2%} {shares[1]:+.2%}"
    print(
        f"{case:30s} {words:16s} allocated {found.peak_allocated / MIB:9.2f} / {real.allocated / MIB:9.2f} MiB, "
        f"reserved {found.peak_reserved / MIB:6.0f} / {real.reserved / MIB:6.0f} MiB, {found.seconds:.1f} s {real.failed}",
        flush=True,
    )
    return shares


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=(*EXACT, *CLOSE))
    parser.add_argument("--arch", default="8.0")
    parser.add_argument("--conf", default="", help="settings of the allocator")
    parser.add_argument("--difference", action="store_true")
    options = parser.parse_args()
    with runner(arch=options.arch) as run, modelled(options.arch):
        if options.difference:
            for case in options.cases:
                difference(case, run)
            return
        shares = [line(case, run, options.conf) for case in options.cases]
    exact, near = sum(each == (0, 0) for each in shares), sum(max(map(abs, each)) <= 0.01 for each in shares)
    print(f"{len(shares)} cases, arch {options.arch} {options.conf}: {exact} to the byte, {near} within 1 %")


if __name__ == "__main__":
    main()
