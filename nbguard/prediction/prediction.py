"""What a fit will take of a GPU's memory, as frozen plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbguard.render.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest training batches with which a fit runs on a GPU, in items: traced, and so was the next larger one."""

    sure: int | None  # it is sure to run: the band stays free; 0: not even one item; None: not all could be traced
    limit: int  # it runs in the model of the allocator, where nothing is kept free; 0: not even one item
    is_whole_set: bool  # the limit is the whole training set
    traces: int  # batch sizes that were tried for the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change to a fit, tried in a trace of its own. All sizes are bytes."""

    name: str  # in words
    peak_allocated: int  # of the fit after the change
    peak_reserved: int  # of the fit after the change
    saved: int  # bytes fewer that are reserved at the peak; below 0: the change takes more
    batch_size: int  # items of a batch after the change
    code: str  # lines of Python that change the Learner `learn`; empty: a setting does it
    settings: str  # of the allocator, as PYTORCH_ALLOC_CONF writes it; empty: lines of Python do it
    cost: str  # what the change costs, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Result):
    """The memory of a fit that has not run, from an empty device. All sizes are bytes."""

    kind: ClassVar[str] = "prediction"
    view: ClassVar[str] = "nbguard.prediction.prediction_view:prediction_blocks"

    gpu: str  # name of the GPU, or its size in words
    capacity: int | None  # of the GPU; None: none was named
    context: int  # that CUDA itself takes of the GPU: assumed, as it differs from one driver to the next
    settings: str  # of the allocator, as PYTORCH_ALLOC_CONF writes them
    torch_version: str  # of the PyTorch whose operators and allocator are followed
    peak_allocated: int  # most bytes in tensors at once, as torch.cuda.max_memory_allocated() will say
    peak_reserved: int  # most bytes that the allocator has at once, as torch.cuda.max_memory_reserved() will say
    end_allocated: int  # in tensors when the fit has ended
    model: int  # parameters and buffers, before the fit
    workspaces: int  # of cuBLAS, kept to the end
    band: int  # that the fit may take beyond `peak_reserved`: memory of libraries that cannot be computed
    fits: bool | None  # on this GPU: yes even with the band, no, or not known
    why: str  # the reason for `fits`
    batch_sizes: tuple[int, ...]  # items of the training batches that were traced
    batches: int  # training batches of an epoch
    convolutions: int  # number of calls of cuDNN's convolutions, whose workspaces are a part of the band
    seconds: float  # that the prediction took
    largest: LargestBatch | None = None  # batch with which the fit runs on this GPU; None: not asked for
    savings: tuple[Saving, ...] = ()  # changes that were tried, the one that saves most first; empty: not asked for
    unknown: tuple[str, ...] = ()  # what was not traced and may take memory: with it nothing is said to fit
    assumptions: tuple[str, ...] = ()  # in words

    @property
    def need(self) -> int:
        """Bytes of a GPU with which the fit is sure to run: reserved memory, CUDA's context and the band."""
        return self.peak_reserved + self.context + self.band
