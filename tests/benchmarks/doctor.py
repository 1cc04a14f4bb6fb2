"""What each tier of `nbguard.diagnose` takes, beside PyTorch's `collect_env`, and `DebugMode` with hashes of each operation.

python tests/benchmarks/doctor.py [--rounds 3]

The first time PyTorch imports its compiler. Memory is what the peak of the process lies above what was resident before, in
the last round (VmHWM, reset before each).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nbguard

_KiB = 1024
_MiB = 1024 * _KiB


def grown(act: Callable[[], Any]) -> tuple[float, float | None]:
    """Return (seconds, MiB that the peak of resident memory lies above what was resident before) of a call."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    start = time.perf_counter()
    act()
    seconds = time.perf_counter() - start
    peak = _status("VmHWM")
    return seconds, None if peak is None or before is None else (peak - before) / _MiB


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * _KiB
    return None


def _debugged(model: nn.Module, batch: torch.Tensor) -> Callable[[], Any]:
    """Return two steps under `DebugMode`, whose hashes are then compared: PyTorch's own look at whether operations repeat."""
    from torch.utils._debug_mode import DebugMode

    def run() -> None:
        logs = []
        for _ in range(2):
            model.zero_grad()
            with DebugMode() as mode, DebugMode.log_tensor_hashes():
                model(batch).float().sum().backward()
            logs.append(mode.logs)
        DebugMode.check_hash_mismatches(*logs)

    return run


def _collected() -> None:
    from torch.utils import collect_env

    with contextlib.redirect_stdout(io.StringIO()):
        collect_env.main()


def main() -> None:
    """Print the median time and the peak of each, the first time and the later ones apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()) for _ in range(8)])
    batch = torch.randn(64, 512)
    step = _step(model, batch)
    cases: dict[str, Callable[[], Any]] = {
        "one step, for scale": step,
        "environment": lambda: nbguard.diagnose(determinism=False, export=False),
        "  torch.utils.collect_env": _collected,
        "determinism": lambda: nbguard.diagnose(model, batch, environment=False, export=False),
        "  DebugMode, 2 steps": _debugged(model, batch),
        "export": lambda: nbguard.diagnose(model, batch, environment=False, determinism=False),
    }
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / _MiB
    print(
        f"  a model of {size:.1f} MiB, a batch of {len(batch)}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    )
    print(f"  {'':<28} {'first':>10} {'later':>10} {'peak grows by':>14}")
    for name, act in cases.items():
        try:
            first, _ = grown(act)
            runs = [grown(act) for _ in range(rounds)]
        except Exception as error:
            print(f"  {name:<28} not measured: {type(error).__name__}: {str(error).partition(chr(10))[0][:60]}")
            continue
        later, growth = statistics.median(seconds for seconds, _ in runs), runs[-1][1]
        shown = "?" if growth is None else f"{growth:.1f} MiB"
        print(f"  {name:<28} {first * 1000:7.1f} ms {later * 1000:7.1f} ms {shown:>14}")


def _step(model: nn.Module, batch: torch.Tensor) -> Callable[[], Any]:
    def run() -> None:
        model(batch).sum().backward()
        model.zero_grad()

    return run


if __name__ == "__main__":
    main()
