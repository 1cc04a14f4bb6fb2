"""The steps of a GPU day, in order: what comes first is there even if time runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.child import with_settings
from tests.gpu.predicted import APPLICATIONS, SHORT
from tests.gpu.recording import SUFFIX
from tests.gpu.workloads import WORKLOADS
from tests.thorough import THOROUGH

_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""For the benchmarks of CPU tensors: where a GPU is visible, nbguard tracks that and not the CPU."""

_DRY = {"NBGUARD_DRY_GPU": "1", "FAKE_CUDA_EVENTS": "manual"}
"""The fake runtime's kernels end at once; its events can be made to wait until somebody waits for them."""

_TESTS = sorted(file.stem for file in Path(__file__).parent.glob("test_*.py") if "pytest.mark.gpu" in file.read_text())
_PYTEST = ["-m", "pytest", "-m", "gpu", "-rfEs", "--confcutdir=tests/gpu", "-o", "addopts="]
"""The fixtures of the whole suite need Jupyter, and its options plugins: neither need be here."""


@dataclass(frozen=True, slots=True)
class Step:
    """One process: `python *arguments`, for at most `limit` seconds. Its output goes into the figures if it has a `title`."""

    name: str
    arguments: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    title: str = ""
    is_alone: bool = False  # nothing runs beside it: it measures time, or reads what the steps before it have made


def steps(work: Path, *, dry: bool) -> Iterator[Step]:
    """Yield the steps; what they make goes into the folder `work`. A dry run that is not thorough is shorter."""
    flags = ["--dry"] if dry else []
    short = dry and not THOROUGH
    for file in _TESTS:
        yield Step(file, [*_PYTEST, f"tests/gpu/{file}.py"], 240, _DRY if dry else {}, ("pytest",))
    of_each_function = {workload.function: name for name, workload in WORKLOADS.items()}  # amp and expandable come last
    for name in of_each_function.values() if short else WORKLOADS:
        workload = WORKLOADS[name]
        arguments = ["-W", "ignore", "-m", "tests.gpu.record", name, str(work / f"recordings/{name}{SUFFIX}"), *flags]
        yield Step(f"record {name}", arguments, 60, with_settings(workload.settings) | (_DRY if dry else {}))
    predicted = ["-W", "ignore", "-m", "tests.gpu.predicted", *(SHORT if short else ())]
    yield Step("predicted", predicted, 180, needs=("fastai", "torchvision"), title="Predicted peaks of fits beside real ones")
    applications = ["-W", "ignore", "-m", "tests.gpu.predicted", APPLICATIONS, *(["regression"] if short else [])]
    title = "Predicted peaks of fastai's applications beside real ones"
    yield Step("applications", applications, 150, needs=("fastai", "torchvision"), title=title)
    pools = ["-W", "ignore", "-m", "tests.gpu.pools"]
    yield Step("pools", pools, 60, title="Private pools of graphs and of captures that failed (`pools.py`)")
    title = "Room on a GPU that is full: moves, the airbag, fits that survive, models that take turns (`room.py`)"
    yield Step("room", ["-W", "ignore", "-m", "tests.gpu.room"], 120, title=title, is_alone=True)
    yield Step("recordings add up", ["-m", "tests.gpu.replay", str(work / "recordings")], 60, is_alone=True)
    yield Step("figures", ["-W", "ignore", "-m", "tests.gpu.bench", str(work / "bench.json")], 120, is_alone=True)
    profiles = ["-W", "ignore", "-m", "tests.profiler.corpus.run", *(["cuda:[g03]", "cuda:bfloat16"] if short else ["cuda"])]
    yield Step("profiles", profiles, 120, needs=("IPython",), is_alone=True)
    overhead = ["-W", "ignore", "tests/benchmarks/profile_overhead.py", "--cuda", "--rounds", "2" if short else "6"]
    title = "What a profile costs a fit on the GPU (`profile_overhead.py --cuda`)"
    yield Step("overhead", overhead, 120, needs=("fastai",), title=title, is_alone=True)
    startup = ["tests/benchmarks/startup.py", "--rounds", "1" if short else "7"]
    yield Step("start-up", startup, 60, needs=("IPython", "numpy"), title="Start-up (`startup.py`)", is_alone=True)
    census = ["-W", "ignore", "tests/benchmarks/census.py", "--rounds", *(["1", "--scene", "tensors"] if short else ["3"])]
    needs = ("fastai", "pandas", "matplotlib")
    yield Step("census", census, 120, _NO_GPU, needs, "Naming every holder of a large heap (`census.py`)", is_alone=True)
