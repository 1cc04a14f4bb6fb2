"""nbguard keeps GPU memory healthy between the experiments of a notebook.

`%load_ext nbguard` gives `%gpumem` (who holds the memory, and why) and `%reset_gpu` (say what a cleanup would give back, then
do it). The same from Python: `report`, `why`, `oom`, `plan`, `release`, `park`, `zombies`, `history`, `notices`, `watch`,
`memory_map`; of recorded snapshots of the allocator `load_snapshot`, `replay`, `what_if`, `snapshot_report`, `snapshot_diff`,
`snapshot_map`, `snapshot_moment`; of this process `record`, `live_moment`, `save_snapshot`, `whatif_report`; a simulated
device: `simulate`; the memory of a fit before it starts: `predict`; whether this machine is set up for a fit, its steps repeat,
and its model exports: `diagnose`; `deterministic` makes it repeat, `exportable` a model that exports; `in_float32` layers in
float32; `run_record` keeps the settings of a run, `compare` shows the differences of two, and `apply_record` sets one again.
`%%profile_fit`, in Python `profile_fit` and `FitMonitor`, says where a fit's time and memory go, and `last_fit` returns its
last report. `survive` and `SurviveOOM` let a training go on after it ran out of memory. `watch_ranks` says which rank of a
distributed job hangs, with the collective and the line; `load_ranks` says the same from dumps of PyTorch's flight recorder,
`launch_errors` whose error came first when a launch failed. `install` says who held the memory where a script or a rank ends by
running out of it, and `job_report` which rank did so first. `engines` shows the memory of the engines of an ipyparallel cluster
in one table.
`Sidebar` is a widget that shows who holds the memory, live. Importing nbguard imports neither torch nor IPython.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbguard.api import airbag, budget, end_zombies, make_room, memory_map, oom, park, plan, release, report, unpark, why
    from nbguard.api import zombies as zombies
    from nbguard.errors import NbguardError, NoTorchError, ParkedError, SettingsError, SnapshotError, StoppedAtNaN, TargetError
    from nbguard.frontend.cluster.engine import engines
    from nbguard.frontend.jobs.folder import job_report
    from nbguard.frontend.jobs.install import install
    from nbguard.frontend.notebook.fit_monitor import FitMonitor as FitMonitor
    from nbguard.frontend.notebook.predictions import predict
    from nbguard.frontend.notebook.profile import last_fit, profile_fit
    from nbguard.frontend.notebook.session import history, notices
    from nbguard.frontend.notebook.widget import Sidebar as Sidebar
    from nbguard.memory.allocator.replay.replay import replay
    from nbguard.memory.allocator.replay.whatif import what_if
    from nbguard.memory.allocator.snapshot.read import load_snapshot
    from nbguard.memory.cells.rounds import watch
    from nbguard.memory.simulation.simulation import simulate
    from nbguard.memory.snapshots.moment import snapshot_moment
    from nbguard.memory.snapshots.report import snapshot_diff, snapshot_map, snapshot_report
    from nbguard.memory.snapshots.save import live_moment, live_snapshot, record, save_snapshot
    from nbguard.memory.snapshots.whatif import whatif_report
    from nbguard.training.doctor.deterministic import deterministic
    from nbguard.training.doctor.diagnose import diagnose
    from nbguard.training.doctor.export.repair import exportable
    from nbguard.training.doctor.launch import diagnose_launch
    from nbguard.training.profiler.nonfinite.float32_layers import in_float32
    from nbguard.training.ranks.errors import launch_errors
    from nbguard.training.ranks.flight_recorder import load_ranks
    from nbguard.training.ranks.watch import watch_ranks
    from nbguard.training.runs.applying import apply_record
    from nbguard.training.runs.comparing import compare
    from nbguard.training.runs.run_record import run_record
    from nbguard.training.survive.learner import SurviveOOM as SurviveOOM
    from nbguard.training.survive.loops import survive

__version__ = "0.1.0"
_ERRORS = ("NbguardError", "NoTorchError", "ParkedError", "SettingsError", "SnapshotError", "StoppedAtNaN", "TargetError")
_API = (
    "airbag",
    "budget",
    "end_zombies",
    "make_room",
    "memory_map",
    "oom",
    "park",
    "plan",
    "release",
    "report",
    "unpark",
    "why",
    "zombies",
)
_HOMES = {
    "FitMonitor": "nbguard.frontend.notebook.fit_monitor",
    "Sidebar": "nbguard.frontend.notebook.widget",
    "SurviveOOM": "nbguard.training.survive.learner",
    "apply_record": "nbguard.training.runs.applying",
    "compare": "nbguard.training.runs.comparing",
    "deterministic": "nbguard.training.doctor.deterministic",
    "diagnose": "nbguard.training.doctor.diagnose",
    "diagnose_launch": "nbguard.training.doctor.launch",
    "engines": "nbguard.frontend.cluster.engine",
    "exportable": "nbguard.training.doctor.export.repair",
    "history": "nbguard.frontend.notebook.session",
    "last_fit": "nbguard.frontend.notebook.profile",
    "in_float32": "nbguard.training.profiler.nonfinite.float32_layers",
    "install": "nbguard.frontend.jobs.install",
    "job_report": "nbguard.frontend.jobs.folder",
    "launch_errors": "nbguard.training.ranks.errors",
    "live_moment": "nbguard.memory.snapshots.save",
    "live_snapshot": "nbguard.memory.snapshots.save",
    "load_ranks": "nbguard.training.ranks.flight_recorder",
    "load_snapshot": "nbguard.memory.allocator.snapshot.read",
    "notices": "nbguard.frontend.notebook.session",
    "predict": "nbguard.frontend.notebook.predictions",
    "profile_fit": "nbguard.frontend.notebook.profile",
    "record": "nbguard.memory.snapshots.save",
    "replay": "nbguard.memory.allocator.replay.replay",
    "run_record": "nbguard.training.runs.run_record",
    "save_snapshot": "nbguard.memory.snapshots.save",
    "snapshot_diff": "nbguard.memory.snapshots.report",
    "snapshot_map": "nbguard.memory.snapshots.report",
    "snapshot_moment": "nbguard.memory.snapshots.moment",
    "snapshot_report": "nbguard.memory.snapshots.report",
    "simulate": "nbguard.memory.simulation.simulation",
    "survive": "nbguard.training.survive.loops",
    "watch": "nbguard.memory.cells.rounds",
    "watch_ranks": "nbguard.training.ranks.watch",
    "what_if": "nbguard.memory.allocator.replay.whatif",
    "whatif_report": "nbguard.memory.snapshots.whatif",
    **dict.fromkeys(_API, "nbguard.api"),
    **dict.fromkeys(_ERRORS, "nbguard.errors"),
}
__all__ = [  # no FitMonitor, SurviveOOM and Sidebar: `import *` must import no library, nor widgets
    "NbguardError",
    "NoTorchError",
    "ParkedError",
    "SettingsError",
    "SnapshotError",
    "StoppedAtNaN",
    "TargetError",
    "airbag",
    "apply_record",
    "budget",
    "compare",
    "deterministic",
    "diagnose",
    "diagnose_launch",
    "end_zombies",
    "engines",
    "exportable",
    "history",
    "in_float32",
    "install",
    "job_report",
    "last_fit",
    "launch_errors",
    "live_moment",
    "live_snapshot",
    "load_ranks",
    "load_snapshot",
    "make_room",
    "memory_map",
    "notices",
    "oom",
    "park",
    "plan",
    "predict",
    "profile_fit",
    "record",
    "release",
    "replay",
    "report",
    "run_record",
    "save_snapshot",
    "simulate",
    "snapshot_diff",
    "snapshot_map",
    "snapshot_moment",
    "snapshot_report",
    "survive",
    "unpark",
    "watch",
    "watch_ranks",
    "what_if",
    "whatif_report",
    "why",
    "zombies",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nbguard' has no attribute {name!r}")
    from importlib import import_module

    from nbguard.processor_time import thread_time_ns

    begun = thread_time_ns()
    module: Any = import_module(_HOMES[name])
    if vars(module).get("import_time") == 0:  # a profile counts it among its own cost
        module.import_time = thread_time_ns() - begun
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, as `%load_ext nbguard` does."""
    from nbguard.frontend.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics out again and leave IPython as it was found."""
    from nbguard.frontend.notebook.magics import unload

    unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "labextension", "dest": "nbguard"}]
