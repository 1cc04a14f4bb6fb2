"""Profiles of fits, made by hand: one in which everything is to be said, a healthy one on a CPU, one that was interrupted."""

from __future__ import annotations

from dataclasses import replace

from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler.analysis.report import (
    Category,
    Comparison,
    EpochRow,
    FitFinding,
    FitReport,
    Growth,
    LoaderVerdict,
    MemoryPoint,
    MemoryReport,
    Overhead,
    PhasePeak,
    RankReport,
    RankRow,
    Remedy,
    RunChange,
    Setting,
    StackPeak,
    TimeRow,
    Timing,
    WorkerTrial,
)
from nbguard.training.profiler.analysis.slowest import StoragePace
from nbguard.training.profiler.analysis.time import phase_log

MiB = 1024**2
GiB = 1024**3
US, MS, S = 10**3, 10**6, 10**9

_STEP = (
    (phase_log.OTHER, 0.0),
    (phase_log.WAIT, 0.0),
    (phase_log.TO_DEVICE, 0.02),
    (phase_log.FORWARD, 0.62),
    (phase_log.LOSS, 0.63),
    (phase_log.BACKWARD, 0.2),
)


def points(
    batches: int, each: int = 92 * MS, base: int = 2 * GiB, top: int = 9 * GiB, leak: int = 0
) -> tuple[MemoryPoint, ...]:
    """Return the counters of so many training batches at the ends of their phases."""
    return tuple(
        MemoryPoint(
            at=batch * each + each * (place + 1) // (len(_STEP) + 1),
            phase=phase,
            batch=batch + 1,
            allocated=base + batch * leak + int(share * top) + (batch % 7) * 20 * MiB,
            reserved=10 * GiB + (1 * GiB if batch > batches // 3 else 0),
        )
        for batch in range(batches)
        for place, (phase, share) in enumerate(_STEP)
    )


def rich() -> FitReport:
    """A fit that waits for its data, leaks, and was run on two ranks and compared."""
    rows = (
        TimeRow(phase=phase_log.WAIT, group="batch", total=38_412_345_678, median=48_210 * US, p95=91_800 * US),
        TimeRow(phase=phase_log.TO_DEVICE, group="batch", total=912_345_001, median=1_204 * US, p95=2_011 * US, gpu=1_130 * US),
        TimeRow(
            phase=phase_log.FORWARD, group="batch", total=7_801_200_345, median=9_810 * US, p95=10_402 * US, gpu=8_702 * US
        ),
        TimeRow(phase=phase_log.LOSS, group="batch", total=121_345_000, median=151 * US, p95=190 * US, gpu=40 * US),
        TimeRow(
            phase=phase_log.BACKWARD, group="batch", total=11_210_400_222, median=14_020 * US, p95=15_630 * US, gpu=13_870 * US
        ),
        TimeRow(phase=phase_log.STEP, group="batch", total=1_911_200_100, median=2_388 * US, p95=2_901 * US, gpu=2_100 * US),
        TimeRow(phase=phase_log.ZERO_GRAD, group="batch", total=60_300_000, median=75 * US, p95=92 * US),
        TimeRow(
            phase=phase_log.callback("Recorder"),
            callback="Recorder",
            group="batch",
            total=2_503_111_222,
            median=3_120 * US,
            p95=3_701 * US,
        ),
        TimeRow(
            phase=phase_log.callback("ProgressCallback"),
            callback="ProgressCallback",
            group="batch",
            total=81_000_000,
            median=98 * US,
            p95=140 * US,
        ),
        TimeRow(
            phase=phase_log.callback("TrainEvalCallback"),
            callback="TrainEvalCallback",
            group="batch",
            total=9_100_000,
            median=11 * US,
            p95=13 * US,
        ),
        TimeRow(
            phase=phase_log.callback("ParamScheduler"),
            callback="ParamScheduler",
            group="batch",
            total=21_800_000,
            median=27 * US,
            p95=31 * US,
        ),
        TimeRow(phase=phase_log.OTHER, group="batch", total=402_000_111, median=500 * US, p95=611 * US),
        TimeRow(phase=phase_log.OWN, group="batch", total=96_000_111, median=119 * US, p95=160 * US),
        TimeRow(phase=phase_log.WAIT, group="validation", total=4_100_200_300),
        TimeRow(phase=phase_log.FORWARD, group="validation", total=1_911_000_000),
        TimeRow(phase=phase_log.LOSS, group="validation", total=31_000_000),
        TimeRow(phase=phase_log.OTHER, group="validation", total=131_000_400),
        TimeRow(phase=phase_log.WORKERS, group="around", total=1_311_000_400),
        TimeRow(phase=phase_log.OTHER, group="around", total=611_000_000),
    )
    epochs = tuple(
        row
        for number in range(1, 6)
        for row in (
            EpochRow(
                number=number,
                is_training=True,
                batches=160,
                total=12_700 * MS + number * 11 * MS,
                wait=7_600 * MS,
                start=(number - 1) * 14_324 * MS,
            ),
            EpochRow(
                number=number,
                is_training=False,
                batches=40,
                total=1_260 * MS,
                wait=810 * MS,
                start=(number - 1) * 14_324 * MS + 12_750 * MS,
            ),
        )
    )
    timing = Timing(
        wall=sum(row.total for row in rows),
        rows=rows,
        batches=800,
        warm_up=3,
        first=1_812 * MS,
        step=79_410 * US,
        step_p95=131_020 * US,
        epochs=epochs,
        fits=1,
        busy=0.342,
        busy_note="from CUDA events",
    )
    loader = LoaderVerdict(
        bound="data",
        sentence="data-bound: 48.2 ms of each batch's 79.4 ms (61%) is waiting for data, and the GPU had work waiting 34% of "
        "the time; at most 46.1 ms per batch to gain",
        gain=46_100 * US,
        advice=(
            FitFinding(
                kind="transform",
                severity="advice",
                what="`Resize` is the slowest transform",
                evidence="5.1 ms of the 6.0 ms that an item takes, measured on 32 items",
                change="resize the files once: `resize_images(path, dest=small, max_size=256)`",
            ),
        ),
        trials=(
            WorkerTrial(0, 91_200 * US, 92 * MS),
            WorkerTrial(2, 48_800 * US, 511 * MS, "now"),
            WorkerTrial(8, 13_310 * US, 902 * MS),
        ),
        storage=StoragePace(per_second=1.2 * 1024**3, nbytes=700 * 1024**2, files=4096, readers=8),
        best=8,
        tuning="8 workers deliver a batch in 13.3 ms, the step without waiting takes 31.2 ms: `num_workers=8` ends the waiting",
    )
    peak = 2 * GiB + int(0.63 * 9 * GiB) + 799 * MiB + 120 * MiB
    memory = MemoryReport(
        device="cuda:0",
        source="torch.cuda",
        peak=peak,
        start=412 * MiB,
        end=2_890 * MiB,
        capacity=79 * GiB,
        peak_reserved=11 * GiB,
        peak_phase=phase_log.LOSS,
        phases=(
            PhasePeak(phase_log.WAIT, 3 * GiB, True),
            PhasePeak(phase_log.FORWARD, 8_100 * MiB),
            PhasePeak(phase_log.LOSS, peak, True),
            PhasePeak(phase_log.BACKWARD, 8_210 * MiB),
        ),
        categories=(
            Category("parameters", 811 * MiB + 12),
            Category("gradients", 811 * MiB + 12),
            Category("optimizer state", 1_622 * MiB + 24),
            Category("inputs", 147 * MiB),
            Category("activations", 4_212 * MiB),
            Category("temporaries", 91 * MiB + 77),
            Category("other", peak - (811 + 811 + 1_622 + 147 + 4_212 + 91) * MiB - 125),
        ),
        points=points(800, 71_620 * US, leak=MiB),
        growth=Growth(per_batch=MiB, batches=797, holder="losses", held=799 * MiB, per_epoch=160 * MiB),
        stacks=(
            StackPeak("model.py:41 forward: x = self.conv2(x)", 2_100 * MiB, "activations"),
            StackPeak("model.py:44 forward: x = F.relu(x)", 1_050 * MiB, "activations"),
            StackPeak("optimizer.py:104 state: torch.zeros_like(p)", 811 * MiB, "optimizer state"),
        ),
    )
    findings = (
        FitFinding(
            kind="workers",
            severity="note",
            what="`persistent_workers` is off",
            evidence="each epoch starts 2 workers, 260 ms",
            change="`persistent_workers=True`",
        ),
        FitFinding(
            kind="graph",
            severity="problem",
            what="`losses` keeps the graph of every batch",
            evidence="797 tensors with a `grad_fn` in it after 797 batches",
            change="`losses.append(loss.item())`",
            nbytes=MiB,
        ),
        FitFinding(
            kind="sync",
            severity="advice",
            what="`Recorder` reads the loss in every batch, which waits for the GPU",
            evidence="`.cpu()` of the loss: 3.1 ms per batch, including 2.9 ms of waiting",
            change="keep `learn.recorder` out of the loop: `learn.remove_cb(Recorder)`",
            time=3_100 * US,
        ),
    )
    remedies = (
        Remedy(name="mixed precision", effect="not measured here: needs a run", measured=False, change="`learn.to_fp16()`"),
        Remedy(
            name="8 workers",
            effect="46.1 ms per batch less, by the trials above",
            measured=True,
            change="`dls = dls.new(num_workers=8)`",
            time=46_100 * US,
        ),
    )
    settings = (
        Setting("cudnn.benchmark", "on", "input shapes vary: each new one is timed anew"),
        Setting("TF32", "off", "`torch.set_float32_matmul_precision('high')` uses it"),
        Setting("deterministic", "off"),
        Setting("OMP threads", "16"),
    )
    ranks = RankReport(
        world=2,
        rows=(
            RankRow(
                rank=0,
                host="node-a",
                pid=4711,
                state="complete",
                batches=800,
                step=79_410 * US,
                wait=48_210 * US,
                backward=14_020 * US,
                peak=peak,
                device="cuda:0",
            ),
            RankRow(
                rank=1,
                host="node-a",
                pid=4712,
                state="complete",
                batches=800,
                step=92_010 * US,
                wait=61_800 * US,
                backward=None,
                peak=None,
                device="cuda:1",
            ),
        ),
        findings=(
            FitFinding(
                kind="straggler",
                severity="advice",
                what="rank 1 is 16 % slower than the others",
                evidence="92.0 ms against 79.4 ms",
                change="look at its loader",
            ),
        ),
        launch="torchrun, rank 0 of 2",
    )
    comparison = Comparison(
        "a step takes 12.3 % less than in the run before, and more memory",
        (
            RunChange(name="step", unit="ns", before=90_500 * US, now=79_410 * US, is_significant=True, low=0.85, high=0.91),
            RunChange(
                name="wait for data", unit="ns", before=48_800 * US, now=48_210 * US, is_significant=False, low=0.97, high=1.01
            ),
            RunChange(name="peak", unit="bytes", before=8 * GiB, now=peak),
        ),
        ("num_workers was 2 and is 2",),
    )
    return FitReport(
        title="In[7] · fastai fit · resnet34",
        ending="complete",
        timing=timing,
        overhead=Overhead(per_mark=412, marks=18_211, watching=96_000_111, share=0.0031, before=210_000_000, after=90_000_000),
        first=(
            "`num_workers=8`: the GPU waits for data in 61 % of each step, and 8 workers end that (46.1 ms per batch)",
            "`losses.append(loss.item())`: the list keeps 1 MiB more in every batch",
        ),
        error="",
        loader=loader,
        memory=memory,
        findings=findings,
        remedies=remedies,
        settings=settings,
        ranks=ranks,
        comparison=comparison,
        notes=("torch.compile was seen: fused operations count as forward",),
        files=("fit.json", "trace.json"),
    )


def healthy() -> FitReport:
    """A short fit on a CPU of which there is nothing to say."""
    rows = (
        TimeRow(phase=phase_log.WAIT, group="batch", total=41_200_111, median=120 * US, p95=161 * US),
        TimeRow(phase=phase_log.FORWARD, group="batch", total=604_300_222, median=1_810 * US, p95=2_002 * US),
        TimeRow(phase=phase_log.LOSS, group="batch", total=31_300_000, median=93 * US, p95=110 * US),
        TimeRow(phase=phase_log.BACKWARD, group="batch", total=912_345_333, median=2_733 * US, p95=3_020 * US),
        TimeRow(phase=phase_log.STEP, group="batch", total=201_200_000, median=602 * US, p95=690 * US),
        TimeRow(phase=phase_log.ZERO_GRAD, group="batch", total=9_300_000, median=28 * US, p95=34 * US),
        TimeRow(
            phase=phase_log.callback("Recorder"),
            callback="Recorder",
            group="batch",
            total=12_100_000,
            median=36 * US,
            p95=44 * US,
        ),
        TimeRow(
            phase=phase_log.callback("ProgressCallback"),
            callback="ProgressCallback",
            group="batch",
            total=18_100_000,
            median=54 * US,
            p95=77 * US,
        ),
        TimeRow(phase=phase_log.OTHER, group="batch", total=91_000_000, median=272 * US, p95=303 * US),
        TimeRow(phase=phase_log.OWN, group="batch", total=1_900_000, median=6 * US, p95=8 * US),
        TimeRow(phase=phase_log.FORWARD, group="validation", total=71_000_000),
        TimeRow(phase=phase_log.WAIT, group="validation", total=9_000_000),
        TimeRow(phase=phase_log.OTHER, group="around", total=61_000_000),
    )
    timing = Timing(
        wall=sum(row.total for row in rows),
        rows=rows,
        batches=330,
        warm_up=3,
        first=21 * MS,
        step=5_790 * US,
        step_p95=6_402 * US,
        epochs=(
            EpochRow(number=1, is_training=True, batches=330, total=1_940 * MS, wait=41 * MS),
            EpochRow(number=1, is_training=False, batches=40, total=80 * MS, wait=9 * MS),
        ),
        fits=1,
        busy=None,
        busy_note="no CUDA device was used",
    )
    loader = LoaderVerdict(
        bound="compute",
        sentence="compute-bound: 0.12 ms of each batch's 5.79 ms (2%) is waiting for data; "
        "the rest goes to the model, the loss and the optimizer",
    )
    memory = MemoryReport(
        device="cpu",
        source="heap of the process",
        peak=310 * MiB,
        start=260 * MiB,
        end=262 * MiB,
        growth=Growth(per_batch=0, batches=327),
    )
    return FitReport(
        title="In[3] · fastai fit · DigitNet",
        ending="complete",
        timing=timing,
        overhead=Overhead(per_mark=401, marks=4_020, watching=1_900_000, share=0.0017),
        first=(f"nothing stands out: {loader.sentence}",),
        error="",
        loader=loader,
        memory=memory,
    )


def partial() -> FitReport:
    """A fit that was interrupted in its second batch, of which little is known."""
    rows = (
        TimeRow(phase=phase_log.WAIT, group="batch", total=91_200_111),
        TimeRow(phase=phase_log.FORWARD, group="batch", total=44_300_222),
        TimeRow(phase=phase_log.BACKWARD, group="batch", total=81_000_333),
        TimeRow(phase=phase_log.OTHER, group="around", total=17_000_000),
    )
    timing = Timing(
        wall=sum(row.total for row in rows),
        rows=rows,
        batches=2,
        warm_up=2,
        first=190 * MS,
        step=None,
        step_p95=None,
        epochs=(EpochRow(number=1, is_training=True, batches=2, total=216 * MS, wait=91 * MS),),
    )
    timing = replace(timing, busy_note="too few batches were followed on the GPU")
    return FitReport(
        title="In[9] · PyTorch loop",
        ending="interrupted",
        timing=timing,
        overhead=Overhead(per_mark=405, marks=31, watching=0, share=0.0001),
        error="KeyboardInterrupt",
        loader=LoaderVerdict(bound="unknown", sentence="not known, because no training batch ran after the warm-up"),
        memory=Unavailable("cuda", "CUDA was not initialised in this process"),
        notes=("the loop was left in mid-epoch",),
    )
