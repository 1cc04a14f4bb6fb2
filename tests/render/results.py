"""An example of every public result."""

from __future__ import annotations

from dataclasses import replace

from nbguard import replay, what_if
from nbguard.frontend.cluster.analysis import Answer, EngineCleanup, EngineDevice, EngineMemory, EnginesCleanup, report_of
from nbguard.frontend.gpu_leaks.results import GpuLeaks, HeldMemory, MemoryOfTest
from nbguard.frontend.jobs.failures import JobFailure, RankFailure
from nbguard.frontend.mcp.access import AssistantAccess, OpenKernel, OpenKernels, WaitingPlan
from nbguard.frontend.notebook.listeners.memory_log import MemoryLogState
from nbguard.memory.allocator.replay.replay import Difference, FileReplay
from nbguard.memory.cleanup.plan.parking import Unparked
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.advice import release_names
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.gpu_models import GpuReading, Gpus
from nbguard.memory.core.processes import Zombies
from nbguard.memory.core.recording import Recording
from nbguard.memory.core.references.explain import explain
from nbguard.memory.core.simulated import SimulationState
from nbguard.memory.reports.memory_map import build_map
from nbguard.memory.reports.notices.notice import Notice, Notices
from nbguard.memory.reports.notices.rounds import Garbage, LeftByRounds, RoundsReport
from nbguard.memory.reports.report import build_report
from nbguard.memory.reports.switches import Switches
from nbguard.memory.room.plan import MadeRoom, MovedMemory
from nbguard.memory.room.spill import AirbagState
from nbguard.memory.room.turns import BudgetState, ModelTurn
from nbguard.memory.snapshots.diagnosis import RefusedRequest, SnapshotDiagnosis
from nbguard.memory.snapshots.load import NotebookNames
from nbguard.memory.snapshots.moment import RecordedHistory
from nbguard.memory.snapshots.report import DeviceDiff, SizeChange, SnapshotDiff, SnapshotReport
from nbguard.memory.snapshots.save import SnapshotFiles
from nbguard.memory.snapshots.whatif import WhatIfs
from nbguard.render.result import Result
from nbguard.training.doctor.analysis.diagnosis import CheckFinding, Diagnosis, checked, not_checked
from nbguard.training.doctor.analysis.export import RepairedModel
from nbguard.training.doctor.analysis.step_trace import Deterministic, StepTimes
from nbguard.training.lint.lint import LintFinding, LintReport
from nbguard.training.profiler.analysis.nonfinite import NanRepair, Origin
from nbguard.training.profiler.analysis.operations import Float32Trial
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis, RankPlace
from nbguard.training.ranks.analysis.facts import RankFault
from nbguard.training.ranks.analysis.launch_errors import LaunchErrors, RankError
from nbguard.training.runs.analysis.applied import AppliedFact, AppliedRecord
from nbguard.training.runs.analysis.comparison import compare_records
from tests.profiler.fit_reports import rich
from tests.render.test_history import _afternoon as _history
from tests.render.test_map import afternoon as _mapped
from tests.render.test_prediction import CELL, FITS, GPUS
from tests.render.test_processes import _KEEPER, _ORPHAN, _OTHER
from tests.render.test_render import _afternoon, _done, _oom
from tests.render.test_saved import _snapshot
from tests.render.test_simulate import _AFTER
from tests.runs.records import run

MiB = 1024**2
_RECORDING = Recording("on", 100_000, 4)
_CHANGE = SizeChange("learn", MiB, 3 * MiB, 2 * MiB)

_SAVED = SnapshotReport(
    file="run.pickle",
    torch_version="2.13.0",
    settings="",
    events=(3,),
    report=build_report(Analysis(_afternoon())),
    notes=("no names",),
)
_THREADS = CheckFinding(
    severity="advice",
    what="PyTorch computes with 64 threads on 8 cores",
    evidence="an affinity gives this process fewer cores than the machine has",
    command="torch.set_num_threads(8)",
)

_FLOAT32 = Float32Trial(dtype="float16", layers=("1.norm",), is_finite=True, largest=120_000.0)
_ENGINES = report_of(
    [
        *(
            EngineMemory(
                engine=number,
                answer=Answer("answered"),
                host="node1",
                pid=4000 + number,
                visible="0",
                devices=(
                    EngineDevice(
                        device="cuda:0", name="A100", uuid="GPU-a", allocated=MiB, reserved=2 * MiB, holder="learn", held=MiB
                    ),
                ),
                stale=number * MiB,
            )
            for number in range(2)
        ),
        EngineMemory(engine=2, answer=Answer("not there", "PyTorch is not imported there")),
    ]
)

_FAILURE = RankFailure(
    rank=2,
    world=4,
    host="node1",
    pid=4711,
    launcher="torchrun",
    job="a",
    at=1_700_000_000.5,
    error="ValueError: a broken image",
    place="train.py:31 in step()",
    card=None,
)

EXAMPLES: tuple[Result, ...] = (
    _FAILURE,
    JobFailure(failures=(_FAILURE,), silent=(0, 1, 3)),
    LaunchErrors(
        errors=(
            RankError(rank=1, error="ValueError: a broken image", place="In[4], line 7 in train()", at=1_700_000_001),
            RankError(rank=0, error="RuntimeError: Connection closed by peer", place="In[4], line 9 in train()"),
        ),
        launched="In[5], line 1",
    ),
    _ENGINES,
    EnginesCleanup(
        engines=(
            EngineCleanup(
                engine=0, answer=Answer("answered"), promised=MiB, freed=MiB, left=0, steps=("1 tensor in a cycle collected",)
            ),
            EngineCleanup(engine=1, answer=Answer("busy", "busy: no answer within 10 s")),
        ),
        is_done=True,
    ),
    RankDiagnosis(
        world=2,
        faults=(
            RankFault(
                kind="left out",
                ranks=(1,),
                collective="all_reduce",
                place="train.py:13",
                last_common=7,
                what="rank 1 left out the `all_reduce` of 4 × float32 that rank 0 waits for at `train.py:13`",
                evidence=("rank 0: `all_reduce` of 4 × float32 at `train.py:13`",),
                remedy="call the same collectives in the same order on all ranks",
            ),
        ),
        places=(
            RankPlace(rank=0, state="running", calls=8, waits_in="`all_reduce` of 4 × float32", stands="train.py:13"),
            RankPlace(rank=1, state="ended", calls=7, waits_in="", stands=""),
        ),
    ),
    run(),
    compare_records(run(), run(("seeds", "torch", "43"))),
    AppliedRecord(
        source="Learner of Linear of 2026-01-02T03:04:05+00:00",
        done=(AppliedFact(topic="seeds", name="torch", recorded="42", before="43"),),
        left=(AppliedFact(topic="versions", name="numpy", recorded="2.4", before="2.5", action="pip install numpy==2.4"),),
    ),
    Deterministic(is_on=True, seed=4, mode="on", times=StepTimes(plain=10, deterministic=12)),
    NanRepair(
        subject="learn",
        met="The loss was NaN in batch 3 of epoch 1",
        origin=Origin(kind="layer", name="1.norm", type="Norm", root="Net", trial=_FLOAT32),
        layers=("1.norm",),
        line="import nbguard; float32 = nbguard.in_float32(learn, '1.norm')",
    ),
    MemoryLogState(places=("runs/memory", "gpu.prom"), cells=3, every=15.0, failed=("cannot log to MLflow: no store",)),
    RepairedModel(name="exportable", replaced=(("layers.13", "ToTensorBase", "Identity"),)),
    Diagnosis(
        subject="Learner of XResNet",
        checks=(
            checked("environment", "threads", "64 threads of PyTorch, 8 cores may be used", _THREADS),
            checked("environment", "/dev/shm", "31 GiB free of 32 GiB"),
            not_checked("export", "ONNX", "onnxscript is not installed"),
        ),
        notes=("callbacks were not run",),
        seconds=0.3,
    ),
    build_report(Analysis(_afternoon())),
    plan_cleanup(_afternoon(), Request()),
    _done(_afternoon()),
    Unparked(names=("a",), nbytes=MiB, tensors=2, devices=("cuda:0",), left=(("b", 3, "no room"),)),
    MadeRoom(device="cuda:0", request=300 * MiB, state="planned", free=MiB, nbytes=2, moves=(MovedMemory(name="a", nbytes=2),)),
    _oom(),
    Zombies(diagnosed=(_ORPHAN, _KEEPER, _OTHER), remaining=((14, "it waits"),)),
    explain(_afternoon(), "learn", 0, "Learner"),
    _history(),
    build_map(Analysis(_mapped()), 300 * MiB),
    CELL,
    GPUS,
    FITS,
    SimulationState("no longer simulated", _AFTER),
    BudgetState(
        device="cuda:0",
        budget=4096 * MiB,
        here=3 * MiB,
        models=(
            ModelTurn(name="learn", nbytes=3 * MiB, parked=False, reason="it is in use by code that runs"),
            ModelTurn(name="old", nbytes=2 * MiB, parked=True, seconds=0.9),
        ),
    ),
    AirbagState(device="cuda:0", size=4096 * MiB, spilled=3 * MiB, most=5 * MiB, holders=("learn",)),
    Switches(oom_card=True, history=True, cells=False, auto_clean_errors=True, recorded=1),
    Notices(
        notices=(
            Notice(
                kind="deleted",
                name="model",
                cell=4,
                nbytes=MiB,
                holders=("runs[0]",),
                advice=(release_names(("runs[0]",), MiB),),
                frees=MiB,
                shape="name: runs[·]",
                names=("model",),
            ),
        ),
        on=True,
    ),
    RoundsReport(
        action="predict(x)",
        rounds=(MiB, MiB),
        left=(LeftByRounds(holder="hist[2]", nbytes=MiB, keeps_graph=True, cell=3, line="In[3], line 2 in step()"),),
        garbage=(Garbage(0, ()), Garbage(2 * MiB, ("Trainer", "State"))),
    ),
    _RECORDING,
    SnapshotFiles(
        path="~/run.pickle",
        file="run.pickle",
        beside="run.pickle.nbguard.json",
        nbytes=3 * MiB,
        segments=1,
        events=1,
        holders=2,
        unnamed=0,
        recording=_RECORDING,
    ),
    _SAVED,
    SnapshotDiagnosis(
        report=_SAVED,
        map=build_map(Analysis(_mapped()), 300 * MiB),
        refusals=(RefusedRequest(device="cuda:0", size=MiB, free=512, site="train.py, line 12", refusals=1),),
        trials=(what_if(_snapshot(), 0, ["expandable_segments:True"], capacity=1024),),
        untried=("cuda:1 cannot be run again, because its trace is cut",),
    ),
    Gpus(
        gpus=(GpuReading(index=0, name="NVIDIA H100", total=80 * MiB, used=MiB, capability=(9, 0)),),
        driver="driver 580.1, CUDA up to 13.0",
        unavailable="",
        processes=(_ORPHAN, _KEEPER),
    ),
    AssistantAccess(on=True, id="a1b2", answered=3, waiting=(WaitingPlan("c3d4", plan_cleanup(_afternoon(), Request())),)),
    OpenKernels(kernels=(OpenKernel(id="a1b2", notebook="work/cats.ipynb", pid=7),)),
    GpuLeaks(
        tracked="cuda",
        minimum=MiB,
        judged=12,
        tests=(
            MemoryOfTest(
                test="tests/test_cats.py::test_fit",
                file="tests/test_cats.py",
                line=7,
                leaks=(HeldMemory(holder="tests/test_cats.py: CACHE[3]", nbytes=2 * MiB, storages=1, line="test_cats.py:9"),),
                peak=3 * MiB,
                limit=2 * MiB,
            ),
        ),
    ),
    LintReport(
        files=2,
        fixed=1,
        findings=(
            LintFinding(
                code="NBG101",
                name="loss-kept",
                file="cats.ipynb",
                cell=3,
                line=7,
                column=5,
                end_line=7,
                message="`total` keeps the graph of each step's `loss`; keep `loss.detach()` or `loss.item()`",
                fixable=True,
            ),
        ),
        left_out=("cats.ipynb: cell 2 is no Python: invalid syntax (line 1)",),
    ),
    RecordedHistory("run.pickle", _snapshot(), NotebookNames()).at("peak"),
    SnapshotDiff(
        "before.pickle",
        "after.pickle",
        (DeviceDiff(device="cuda:0", allocated=_CHANGE, reserved=_CHANGE, holders=(_CHANGE,), pools=()),),
        ("no names",),
    ),
    WhatIfs(
        "run.pickle", (what_if(_snapshot(), 0, ["expandable_segments:True"]),), (release_names(["x"]).code + " frees 1 B",)
    ),
    what_if(_snapshot(), 0, ["expandable_segments:True"], capacity=1024),
    replace(replay(_snapshot())[0], first_difference=Difference(1, ("alloc", 512, 512, 0), ("alloc", 1024, 512, 0))),
    FileReplay("run.pickle", replay(_snapshot())),
    rich(),
)
RESULTS: tuple[type[Result], ...] = tuple(type(example) for example in EXAMPLES)
