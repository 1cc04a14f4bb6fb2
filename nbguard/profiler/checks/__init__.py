"""The checks of a fit, each in one file: what it watches, its facts, its judgement and its words."""

from __future__ import annotations

from nbguard.profiler.checks.amp import AmpWatch
from nbguard.profiler.checks.check import FitCheck
from nbguard.profiler.checks.compiles import CompileWatch
from nbguard.profiler.checks.fp16_range import RangeWatch
from nbguard.profiler.checks.loop_names import LoopNameWatch
from nbguard.profiler.checks.loss_input import LossInputWatch
from nbguard.profiler.checks.optimizers import OptimizerWatch
from nbguard.profiler.checks.retained_graphs import RetainWatch
from nbguard.profiler.checks.switches import SwitchWatch
from nbguard.profiler.checks.syncs import SyncWatch
from nbguard.profiler.checks.unused_graphs import UnusedGraphWatch

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
"""All checks, in the order in which they are started and their findings of the same weight are shown."""
