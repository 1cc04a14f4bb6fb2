"""Profiles of fits, made by hand: one in which everything is to be said, a healthy one on a CPU, one that was interrupted."""

from __future__ import annotations

from dataclasses import replace

from nbguard.memory.facts import Unavailable
from nbguard.profiler.analysis.report import (
    Category,
    Change,
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
    Setting,
    StackPeak,
    TimeRow,
    Timing,
    WorkerTrial,
)
from nbguard.profiler.analysis.time import phases

MiB = 1024**2
GiB = 1024**3
US, MS, S = 10**3, 10**6, 10**9

_STEP = (
    (phases.OTHER, 0.0),
    (phases.WAIT, 0.0),
    (phases.TO_DEVICE, 0.02),
    (phases.FORWARD, 0.62),
    (phases.LOSS, 0.63),
    (phases.BACKWARD, 0.2),
)


def points(
    batches: int, each: int = 92 * MS, base: int = 2 * GiB, top: int = 9 * GiB, leak: int = 0
) -> tuple[MemoryPoint, ...]:
    """Return the counters of so many training batches at the ends of their phases."""
    return tuple(
        MemoryPoint(
            batch * each + each * (place + 1) // (len(_STEP) + 1),
            phase,
            batch + 1,
            base + batch * leak + int(share * top) + (batch % 7) * 20 * MiB,
            10 * GiB + (1 * GiB if batch > batches // 3 else 0),
        )
        for batch in range(batches)
        for place, (phase, share) in enumerate(_STEP)
    )


def rich() -> FitReport:
    """A fit that waits for its data, leaks, and was run on two ranks and compared."""
    rows = (
        TimeRow(phases.WAIT, "batch", 38_412_345_678, 48_210 * US, 91_800 * US),
        TimeRow(phases.TO_DEVICE, "batch", 912_345_001, 1_204 * US, 2_011 * US, 1_130 * US),
        TimeRow(phases.FORWARD, "batch", 7_801_200_345, 9_810 * US, 10_402 * US, 8_702 * US),
        TimeRow(phases.LOSS, "batch", 121_345_000, 151 * US, 190 * US, 40 * US),
        TimeRow(phases.BACKWARD, "batch", 11_210_400_222, 14_020 * US, 15_630 * US, 13_870 * US),
        TimeRow(phases.STEP, "batch", 1_911_200_100, 2_388 * US, 2_901 * US, 2_100 * US),
        TimeRow(phases.ZERO_GRAD, "batch", 60_300_000, 75 * US, 92 * US),
        TimeRow(phases.callback("Recorder"), "batch", 2_503_111_222, 3_120 * US, 3_701 * US),
        TimeRow(phases.callback("ProgressCallback"), "batch", 81_000_000, 98 * US, 140 * US),
        TimeRow(phases.callback("TrainEvalCallback"), "batch", 9_100_000, 11 * US, 13 * US),
        TimeRow(phases.callback("ParamScheduler"), "batch", 21_800_000, 27 * US, 31 * US),
        TimeRow(phases.OTHER, "batch", 402_000_111, 500 * US, 611 * US),
        TimeRow(phases.OWN, "batch", 96_000_111, 119 * US, 160 * US),
        TimeRow(phases.WAIT, "validation", 4_100_200_300),
        TimeRow(phases.FORWARD, "validation", 1_911_000_000),
        TimeRow(phases.LOSS, "validation", 31_000_000),
        TimeRow(phases.OTHER, "validation", 131_000_400),
        TimeRow(phases.WORKERS, "around", 1_311_000_400),
        TimeRow(phases.OTHER, "around", 611_000_000),
    )
    epochs = tuple(
        row
        for number in range(1, 6)
        for row in (
            EpochRow(number, True, 160, 12_700 * MS + number * 11 * MS, 7_600 * MS, (number - 1) * 14_324 * MS),
            EpochRow(number, False, 40, 1_260 * MS, 810 * MS, (number - 1) * 14_324 * MS + 12_750 * MS),
        )
    )
    timing = Timing(
        sum(row.total for row in rows),
        rows,
        800,
        3,
        1_812 * MS,
        79_410 * US,
        131_020 * US,
        epochs,
        1,
        0.342,
        "from CUDA events",
    )
    loader = LoaderVerdict(
        "data",
        "data-bound: 48.2 ms of each batch's 79.4 ms (61%) is waiting for data, and the GPU worked 34% of the time; "
        "at most 46.1 ms per batch to gain",
        46_100 * US,
        (
            FitFinding(
                "transform",
                "advice",
                "`Resize` is the slowest transform",
                "5.1 ms of the 6.0 ms that an item takes, measured on 32 items",
                "resize the files once: `resize_images(path, dest=small, max_size=256)`",
            ),
        ),
        (
            WorkerTrial(0, 91_200 * US, 92 * MS),
            WorkerTrial(2, 48_800 * US, 511 * MS, "now"),
            WorkerTrial(8, 13_310 * US, 902 * MS),
        ),
        8,
        "8 workers deliver a batch in 13.3 ms, the step without waiting takes 31.2 ms: `num_workers=8` ends the waiting",
    )
    peak = 2 * GiB + int(0.63 * 9 * GiB) + 799 * MiB + 120 * MiB
    memory = MemoryReport(
        "cuda:0",
        "torch.cuda",
        peak,
        412 * MiB,
        2_890 * MiB,
        79 * GiB,
        11 * GiB,
        phases.LOSS,
        (
            PhasePeak(phases.WAIT, 3 * GiB, True),
            PhasePeak(phases.FORWARD, 8_100 * MiB),
            PhasePeak(phases.LOSS, peak, True),
            PhasePeak(phases.BACKWARD, 8_210 * MiB),
        ),
        (
            Category("parameters", 811 * MiB + 12),
            Category("gradients", 811 * MiB + 12),
            Category("optimizer state", 1_622 * MiB + 24),
            Category("inputs", 147 * MiB),
            Category("activations", 4_212 * MiB),
            Category("temporaries", 91 * MiB + 77),
            Category("other", peak - (811 + 811 + 1_622 + 147 + 4_212 + 91) * MiB - 125),
        ),
        points(800, 71_620 * US, leak=MiB),
        Growth(MiB, 797, "losses", 799 * MiB, 160 * MiB),
        (
            StackPeak("model.py:41 forward: x = self.conv2(x)", 2_100 * MiB, "activations"),
            StackPeak("model.py:44 forward: x = F.relu(x)", 1_050 * MiB, "activations"),
            StackPeak("optimizer.py:104 state: torch.zeros_like(p)", 811 * MiB, "optimizer state"),
        ),
    )
    findings = (
        FitFinding(
            "workers", "note", "`persistent_workers` is off", "each epoch starts 2 workers, 260 ms", "`persistent_workers=True`"
        ),
        FitFinding(
            "graph",
            "problem",
            "`losses` keeps the graph of every batch",
            "797 tensors with a `grad_fn` in it after 797 batches",
            "`losses.append(loss.item())`",
            nbytes=MiB,
        ),
        FitFinding(
            "sync",
            "advice",
            "`Recorder` reads the loss in every batch, which waits for the GPU",
            "`.cpu()` of the loss: 3.1 ms per batch, of it 2.9 ms waiting",
            "keep `learn.recorder` out of the loop: `learn.remove_cb(Recorder)`",
            3_100 * US,
        ),
    )
    remedies = (
        Remedy("mixed precision", "not measured here: needs a run", False, "`learn.to_fp16()`"),
        Remedy("8 workers", "46.1 ms per batch less, by the trials above", True, "`dls = dls.new(num_workers=8)`", 46_100 * US),
    )
    settings = (
        Setting("cudnn.benchmark", "on", "input shapes vary: each new one is timed anew"),
        Setting("TF32", "off", "`torch.set_float32_matmul_precision('high')` uses it"),
        Setting("deterministic", "off"),
        Setting("OMP threads", "16"),
    )
    ranks = RankReport(
        2,
        (
            RankRow(0, "node-a", 4711, "complete", 800, 79_410 * US, 48_210 * US, 14_020 * US, peak, "cuda:0"),
            RankRow(1, "node-a", 4712, "complete", 800, 92_010 * US, 61_800 * US, None, None, "cuda:1"),
        ),
        (
            FitFinding(
                "straggler", "advice", "rank 1 is 16 % slower than the others", "92.0 ms against 79.4 ms", "look at its loader"
            ),
        ),
    )
    comparison = Comparison(
        "a step takes 12.3 % less than in the run before, and more memory",
        (
            Change("step", "ns", 90_500 * US, 79_410 * US, True, 0.85, 0.91),
            Change("wait for data", "ns", 48_800 * US, 48_210 * US, False, 0.97, 1.01),
            Change("peak", "bytes", 8 * GiB, peak),
        ),
        ("num_workers was 2 and is 2",),
    )
    return FitReport(
        "In[7] · fastai fit · resnet34",
        "complete",
        timing,
        Overhead(412, 18_211, 96_000_111, 0.0014),
        (
            "`num_workers=8`: the GPU waits for data in 61 % of each step, and 8 workers end that (46.1 ms per batch)",
            "`losses.append(loss.item())`: the list keeps 1.00 MiB more in every batch",
        ),
        "",
        loader,
        memory,
        findings,
        remedies,
        settings,
        ranks,
        comparison,
        ("torch.compile was seen: what it fuses counts as forward",),
        ("fit.json", "trace.json"),
    )


def healthy() -> FitReport:
    """A short fit on a CPU of which there is nothing to say."""
    rows = (
        TimeRow(phases.WAIT, "batch", 41_200_111, 120 * US, 161 * US),
        TimeRow(phases.FORWARD, "batch", 604_300_222, 1_810 * US, 2_002 * US),
        TimeRow(phases.LOSS, "batch", 31_300_000, 93 * US, 110 * US),
        TimeRow(phases.BACKWARD, "batch", 912_345_333, 2_733 * US, 3_020 * US),
        TimeRow(phases.STEP, "batch", 201_200_000, 602 * US, 690 * US),
        TimeRow(phases.ZERO_GRAD, "batch", 9_300_000, 28 * US, 34 * US),
        TimeRow(phases.callback("Recorder"), "batch", 12_100_000, 36 * US, 44 * US),
        TimeRow(phases.callback("ProgressCallback"), "batch", 18_100_000, 54 * US, 77 * US),
        TimeRow(phases.OTHER, "batch", 91_000_000, 272 * US, 303 * US),
        TimeRow(phases.OWN, "batch", 1_900_000, 6 * US, 8 * US),
        TimeRow(phases.FORWARD, "validation", 71_000_000),
        TimeRow(phases.WAIT, "validation", 9_000_000),
        TimeRow(phases.OTHER, "around", 61_000_000),
    )
    timing = Timing(
        sum(row.total for row in rows),
        rows,
        330,
        3,
        21 * MS,
        5_790 * US,
        6_402 * US,
        (EpochRow(1, True, 330, 1_940 * MS, 41 * MS), EpochRow(1, False, 40, 80 * MS, 9 * MS)),
        1,
        None,
        "no CUDA device was used",
    )
    loader = LoaderVerdict(
        "compute", "compute-bound: 0.12 ms of each batch's 5.79 ms (2%) is waiting for data; the rest is the model's own work"
    )
    memory = MemoryReport("cpu", "heap of the process", 310 * MiB, 260 * MiB, 262 * MiB, growth=Growth(0, 327))
    return FitReport(
        "In[3] · fastai fit · DigitNet",
        "complete",
        timing,
        Overhead(401, 4_020, 1_900_000, 0.0017),
        (f"nothing stands out: {loader.sentence}",),
        "",
        loader,
        memory,
    )


def partial() -> FitReport:
    """A fit that was interrupted in its second batch, of which little is known."""
    rows = (
        TimeRow(phases.WAIT, "batch", 91_200_111),
        TimeRow(phases.FORWARD, "batch", 44_300_222),
        TimeRow(phases.BACKWARD, "batch", 81_000_333),
        TimeRow(phases.OTHER, "around", 17_000_000),
    )
    timing = Timing(
        sum(row.total for row in rows), rows, 2, 2, 190 * MS, None, None, (EpochRow(1, True, 2, 216 * MS, 91 * MS),)
    )
    timing = replace(timing, busy_note="too few batches were followed on the GPU")
    return FitReport(
        "In[9] · PyTorch loop",
        "interrupted",
        timing,
        Overhead(405, 31, 0, 0.0001),
        error="KeyboardInterrupt",
        loader=LoaderVerdict("unknown", "no training batch of a steady state was seen: what the fit waits for is not known"),
        memory=Unavailable("cuda", "CUDA was not initialised in this process"),
        notes=("the loop was left in mid-epoch",),
    )
