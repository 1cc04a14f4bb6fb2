"""The checks of a fit, each in one file, with its watch, its facts, its diagnosis and its words."""

from __future__ import annotations

from nbguard.training.profiler.checks.amp import AmpWatch
from nbguard.training.profiler.checks.check import FitCheck
from nbguard.training.profiler.checks.compiles import CompileWatch
from nbguard.training.profiler.checks.fp16_range import RangeWatch
from nbguard.training.profiler.checks.graphs import RetainWatch, UnusedGraphWatch
from nbguard.training.profiler.checks.loop_names import LoopNameWatch
from nbguard.training.profiler.checks.loss_input import LossInputWatch
from nbguard.training.profiler.checks.optimizers import OptimizerWatch
from nbguard.training.profiler.checks.switches import SwitchWatch
from nbguard.training.profiler.checks.syncs import SyncWatch

CHECKS: tuple[type[FitCheck], ...] = (
    AmpWatch,
    OptimizerWatch,
    CompileWatch,
    LossInputWatch,
    RangeWatch,
    RetainWatch,
    UnusedGraphWatch,
    LoopNameWatch,
    SwitchWatch,
    SyncWatch,
)
"""All checks, in the order of their start and of their findings of the same weight."""
