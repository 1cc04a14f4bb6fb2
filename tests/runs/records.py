"""Records of runs, made by hand."""

from __future__ import annotations

from nbguard.training.runs.analysis.record import MissingFact, RunCell, RunFact, RunRecord, Topic

FACTS: dict[tuple[Topic, str], str] = {
    ("seeds", "torch"): "42",
    ("seeds", "hash seed"): "random in each process",
    ("seeds", "calls"): "set_seed(42)",
    ("data", "training items"): "800",
    ("data", "training sizes"): "aaaa of 800 files",
    ("data", "newest change"): "2026-01-01T00:00:00+00:00",
    ("split", "validation names"): "bbbb",
    ("hyper-parameters", "lr of group 0"): "0.001",
    ("model", "structure"): "cccc",
    ("model", "weights"): "dddd",
    ("loaders", "training batch size"): "64",
    ("loaders", "training workers"): "4",
    ("loaders", "training prefetch"): "2",
    ("precision", "float32 matmul"): "highest",
    ("generators", "torch"): "eeee",
    ("generators", "python"): "ffff",
    ("code", "module train_tools"): "9999",
    ("versions", "torch"): "2.13.0",
    ("versions", "tqdm"): "4.66",
    ("hardware", "GPUs"): "NVIDIA A, capability 8.0",
    ("variables", "CUBLAS_WORKSPACE_CONFIG"): ":4096:8",
    ("git", "commit"): "1234",
    ("place", "host"): "here",
}
CELLS = (
    RunCell(number=1, source="from fastai.vision.all import *", role="made"),
    RunCell(number=2, source="dls = make()\nlearn = vision_learner(dls, resnet18)", role="made", edited="no"),
    RunCell(number=3, source="learn.fit(3, 1e-3)", role="runs", edited="yes"),
)


def run(*changes: tuple[Topic, str, str], cells: tuple[RunCell, ...] = CELLS, without: tuple[str, ...] = ()) -> RunRecord:
    """Return a record with these facts changed, and those of the names in `without` not known."""
    facts = FACTS | {(topic, name): value for topic, name, value in changes}
    return RunRecord(
        subject="Learner of Sequential",
        time="2026-01-02T03:04:05+00:00",
        facts=tuple(RunFact(topic, name, value) for (topic, name), value in facts.items() if name not in without),
        missing=tuple(MissingFact("data", name, "nobody could read it") for name in without),
        cells=cells,
        diff="-a\n+b",
        seconds=0.2,
    )
