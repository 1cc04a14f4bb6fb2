"""A fit's predicted GPU memory, as frozen plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, TypeAlias

from nbguard.render.result import Result


class FitPhase(str, Enum):
    """A part of the handling of a batch, in JSON; members stand in the order of their run."""

    START = "start"  # the model is moved to the device
    BATCH = "batch"  # the batch comes to the device, and its transforms run there
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    STEP = "step"  # of the optimizer
    VALIDATION = "validation"  # without gradients

    __str__ = str.__str__
    __repr__ = str.__repr__


class MemoryCategory(str, Enum):
    """A kind of memory of a fit, in JSON."""

    PARAMETERS = "parameters"  # and buffers
    GRADIENTS = "gradients"  # memory that the backward pass makes and leaves
    OPTIMIZER_STATE = "optimizer state"  # memory that the optimizer's step makes and leaves
    INPUTS = "inputs"
    ACTIVATIONS = "saved activations"  # memory from the forward pass for the backward pass, with outputs and loss
    TEMPORARIES = "temporaries"  # memory that a phase makes and lets go of, kernels' own buffers among them
    WORKSPACES = "workspaces"  # of cuBLAS
    HELD = "held before"  # on the device when the fit begins, and not the fit's

    __str__ = str.__str__
    __repr__ = str.__repr__


@dataclass(frozen=True, slots=True)
class FitPhasePeak:
    """The memory of one phase."""

    phase: FitPhase
    peak_allocated: int  # most bytes in tensors at once while it runs


@dataclass(frozen=True, slots=True)
class CategoryBytes:
    """The memory of one category."""

    category: MemoryCategory
    nbytes: int  # of blocks, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPlace:
    """The allocation that reaches a fit's peak."""

    phase: FitPhase
    batch: int  # number of the batch, from 1 on
    operator: str  # of PyTorch's, as `aten.mm.default`; empty for a buffer of a kernel's own
    module: str  # path of the module that is called, or whose backward pass runs; empty if none, or the model itself
    module_class: str  # its class; empty for no module
    line: str  # of the user's code, as `forward() in model, line 12`; empty for a library's, as in most backward passes


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest training batches that a fit runs with on a GPU, in items, each traced, as was the next larger one."""

    sure: int | None  # it is sure to run: the band stays free; 0 for not even one item; None if not all could be traced
    limit: int  # it runs in the model of the allocator, where nothing is kept free; 0 for not even one item
    is_whole_set: bool  # the limit is the whole training set
    traces: int  # batch sizes that were tried for the limit


ChangeKind: TypeAlias = Literal["", "precision", "accumulation", "checkpoints", "frozen"]
"""A change that others ask for: half precision, gradients of several batches added up, checkpoints, or a frozen body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change to a fit, tried in a trace of its own. All sizes are bytes."""

    name: str  # in words
    peak_allocated: int  # of the fit after the change
    peak_reserved: int  # of the fit after the change
    saved: int  # bytes fewer that are reserved at the peak; below 0: the change takes more
    batch_size: int  # items of a batch after the change
    code: str  # lines of Python that change the Learner `learn`, or a step's models by name; empty if a setting does it
    settings: str  # of the allocator, as PYTORCH_ALLOC_CONF writes it; empty if lines of Python do it
    cost: str  # cost of the change, in words
    fits: bool | None = None  # on this GPU, after the change: yes even with the band, no, or not known
    largest: LargestBatch | None = None  # batch that the fit runs with on this GPU after it; None if not asked for
    kind: ChangeKind = field(default="", metadata={"json": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Result):
    """The memory of a fit that has not run. All sizes are bytes."""

    kind: ClassVar[str] = "prediction"
    view: ClassVar[str] = "nbguard.training.prediction.prediction_view:prediction_blocks"

    gpu: str  # name of the GPU, or its size in words
    capacity: int | None  # of the GPU; None if none was named
    context: int  # of the GPU that is not PyTorch's: CUDA's own, assumed; on a live device measured, with other processes
    is_live: bool  # the fit begins on the device of this process as it is now; else on an empty one
    held: int  # in tensors on the device before the fit, and not the fit's
    settings: str  # of the allocator, as PYTORCH_ALLOC_CONF writes them
    torch_version: str  # of the PyTorch whose operators and allocator are followed
    peak_allocated: int  # most bytes in tensors at once, as torch.cuda.max_memory_allocated() will say
    peak_reserved: int  # most bytes that the allocator has at once, as torch.cuda.max_memory_reserved() will say
    end_allocated: int  # in tensors at the end of the fit
    model: int  # parameters and buffers, before the fit
    workspaces: int  # of cuBLAS, kept to the end
    phases: tuple[FitPhasePeak, ...]  # peak of each phase, in their order in a batch
    categories: tuple[CategoryBytes, ...]  # memory allocated at the peak, the largest first: adds up to `peak_allocated`
    peak: PeakPlace  # where the peak is
    first_batch: int  # most bytes in tensors at once in the first batch, before there is optimizer state
    steady: int  # most bytes in tensors at once in a later full batch
    band: int  # that the fit may take beyond `peak_reserved`: memory of libraries that cannot be computed
    fits: bool | None  # on this GPU: yes even with the band, no, or not known
    why: str  # the reason for `fits`
    batch_sizes: tuple[int, ...]  # items of the training batches that were traced
    batches: int | None  # training batches of an epoch; None if unknown, as of a step function
    convolutions: int  # number of calls of cuDNN's convolutions, whose workspaces are a part of the band
    seconds: float  # that the prediction took, without imports
    import_seconds: float = 0.0  # that it took besides to import parts of PyTorch, as the first one of a process does
    largest: LargestBatch | None = None  # batch that the fit runs with on this GPU; None if not asked for
    savings: tuple[Saving, ...] = ()  # changes that were tried, the one that saves most first; empty if not asked for
    unknown: tuple[str, ...] = ()  # untraced parts that may take memory: with them nothing is said to fit
    assumptions: tuple[str, ...] = ()  # in words

    @property
    def need(self) -> int:
        """Bytes of a GPU that the fit is sure to run with: reserved memory, CUDA's context and the band."""
        return self.peak_reserved + self.context + self.band


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeseenFit:
    """A fit that a cell would start."""

    text: str  # its line, in words
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPrediction(Result):
    """The memory of the fits that a cell would start, or of a script's first."""

    kind: ClassVar[str] = "cell_prediction"
    view: ClassVar[str] = "nbguard.training.prediction.prediction_view:cell_blocks"

    executed: str  # code that has run, in words
    fits: tuple[ForeseenFit, ...]  # in their order; each begins on the device as it is before the cell


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuComparison(Result):
    """The memory of the same fits on several GPUs."""

    kind: ClassVar[str] = "gpu_comparison"
    view: ClassVar[str] = "nbguard.training.prediction.prediction_view:comparison_blocks"

    executed: str  # as of `CellPrediction`; empty if nothing has run
    fits: tuple[ForeseenFit, ...]  # all on the first GPU, then all on the next; each GPU is empty before a fit
