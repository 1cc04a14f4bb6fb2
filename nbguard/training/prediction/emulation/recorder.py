"""The births and deaths of a traced fit's memory, by phase, with the parts and the place of the peak."""

from __future__ import annotations

import linecache
import sys
import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch

from nbguard.libraries import calling_modules
from nbguard.memory.simulation.device import SimulatedDevice
from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.prediction import CategoryBytes, FitPhase, FitPhasePeak, MemoryCategory, PeakPlace
from nbguard.training.prediction.rules.attention import attention
from nbguard.training.prediction.rules.recurrent import gru_cell, layers, lstm_cell

# --- Operators that PyTorch composes of others in another way on CUDA than on meta tensors or under a dispatch mode.
#
# Their kernels stand where autograd of meta tensors would, so that callers in C++ meet them, too.


KEY = "AutogradMeta"


_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def kernels(gpu: Gpu, note_layers: Callable[[int], None], dtype: Callable[[], Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (operator, kernel) as they run on `gpu`.

    Args:
        gpu: the GPU.
        note_layers: is told the bytes that recurrent layers may take beyond those of the trace.
        dtype: returns that of mixed precision, None where it is off.
    """
    for name in _LAYERS:
        for overload in ("input", "data"):
            yield f"{name}.{overload}", partial(layers, name, note_layers, dtype)
    yield "dropout", _dropout
    yield "linear", _linear
    if hasattr(torch.ops.aten, "_fused_rms_norm"):  # since PyTorch 2.8
        yield "rms_norm", _rms_norm
    yield "mish_backward", _mish_backward
    yield "lstm_cell", lstm_cell
    yield "gru_cell", gru_cell
    yield "scaled_dot_product_attention", partial(attention, gpu)


def _dropout(tensor: Any, probability: float, train: bool) -> Any:
    """Return the outputs of CUDA's fused kernel, which saves a mask (aten/src/ATen/native/Dropout.cpp)."""
    if not train or probability == 0 or not tensor.numel():
        return tensor
    if probability < 1:
        return torch.ops.aten.native_dropout(tensor, probability, True)[0]
    return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)


def _linear(tensor: Any, weight: Any, bias: Any = None) -> Any:
    """Return the product with the bias added in place (aten/src/ATen/native/Linear.cpp): under a mode it takes a new one."""
    if bias is not None and tensor.ndim == 2:
        return torch.addmm(bias, tensor, weight.t())
    if bias is not None and tensor.ndim == 3 and tensor.is_contiguous():
        rows = tensor.reshape(-1, tensor.shape[-1])
        return torch.addmm(bias, rows, weight.t()).view(*tensor.shape[:-1], weight.shape[0])
    out = torch.matmul(tensor, weight.t())
    return out if bias is None else out.add_(bias)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """CUDA's fused kernel: the output, and one number for each row (`_fused_rms_norm_cuda` in layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, weight: Any, rows: list[int]) -> Any:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
        ctx.save_for_backward(tensor, weight, torch.empty(rows, dtype=dtype, device="meta"))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004 - its size is the output's
        tensor, weight, _ = ctx.saved_tensors
        wanted = zip((tensor, weight), ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(each) if is_wanted else None for each, is_wanted in wanted), None


def _rms_norm(tensor: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:  # noqa: ARG001 - the operator's
    rows = [*tensor.shape[: tensor.ndim - len(shape)], *[1] * len(shape)]
    return _RmsNorm.apply(tensor, weight, rows)


def _mish_backward(gradient: Any, _: Any) -> Any:
    """Return the gradient that CUDA's kernel makes at once, where meta tensors take several steps."""
    return torch.empty_like(gradient)


_CALLERS = ("torch", "nbguard", "functools", "contextlib")
"""Packages whose lines are not named, besides those of training libraries: they call the user's."""
_TRACE = "nbguard.training.prediction.trace"
"""Module below which no frame is the fit's."""
_FORWARD = frozenset({FitPhase.FORWARD, FitPhase.LOSS})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Birth:
    nbytes: int  # of the block
    phase: FitPhase
    run: int  # number of the run of the phase
    kind: MemoryCategory | None  # None if by phase and life
    recomputes: bool  # made in the backward pass with gradients on, as a checkpoint does


class RecordingDevice(SimulatedDevice):
    """A modelled device that remembers the phase of a fit that made each block, and whether it outlived the phase."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: int = 0
        """Bytes that are on the device before the fit, and stay."""
        self.is_stepping = False
        """Whether an optimizer steps."""
        self.steps = self.passes = 0
        """Steps of optimizers and backward passes that there were."""
        self._kind: MemoryCategory | None = None
        self._phase: FitPhase | None = FitPhase.START
        self.batch: int = 0
        """Number of the batch that runs, from 1 on; 0 before the first."""
        self._modules: list[Any] = []  # that are being called, the innermost last
        self._is_model = self._was_called = False  # whether the outermost has parameters; whether one was called in this batch
        self._boundaries: list[tuple[int, Any]] = []  # (number of the next autograd node, innermost module from there on)
        self._births: list[_Birth] = []
        self._deaths: dict[int, tuple[int, int]] = {}  # number of a birth → (births until then, run)
        self._alive: dict[int, int] = {}  # address → number of the birth
        self._run, self._last = 0, FitPhase.START
        self._phases: Counter[FitPhase] = Counter()
        self._batches: Counter[int] = Counter()
        self._starts: list[int] = []  # bytes in tensors when each batch begins
        self._peak = self._births_at_peak = 0
        self._place: tuple[FitPhase, int, str, Any] = FitPhase.START, 0, "", None
        self._line: tuple[str, str, str, int] | None = None  # function, module, file and number of the line at the peak

    def born(self, nbytes: int, op: Any, *, is_older: bool) -> int:
        """Return the address of a block for a storage, and note it."""
        token = super().born(nbytes, op, is_older=is_older)
        if not token:
            return token
        phase, allocated, block = self._current(), self.model.allocated, self.model.live.get(token)
        self._alive[token] = len(self._births)
        recomputes = phase is FitPhase.BACKWARD and torch.is_grad_enabled()
        nbytes = 0 if block is None else block.size
        self._births.append(_Birth(nbytes=nbytes, phase=phase, run=self._run, kind=self._kind, recomputes=recomputes))
        self._phases[phase] = max(self._phases[phase], allocated)
        self._batches[self.batch] = max(self._batches[self.batch], allocated)
        if allocated > self._peak:
            self._peak, self._births_at_peak = allocated, len(self._births)
            self._place = phase, self.batch, "" if op is None else str(op), self._module()
            frame = _user_frame(sys._getframe(1))
            code = None if frame is None else frame.f_code
            self._line = code and (code.co_name, str(frame.f_globals.get("__name__")), code.co_filename, frame.f_lineno)
        return token

    def died(self, token: int) -> None:
        """Free the block of a storage, and note when."""
        number = self._alive.pop(token, None)
        if number is not None:
            self._current()
            self._deaths[number] = len(self._births), self._run
        super().died(token)

    def begin(self) -> None:
        """Note the memory on the device before the fit."""
        self._peak = self.held = self.model.allocated

    # --- told by the trace ------------------------------------------------------------------------------------------------

    @contextmanager
    def making(self, kind: MemoryCategory | None, phase: FitPhase | None = None) -> Iterator[None]:
        """Return a context whose allocations are of one category, in a phase if one is given."""
        former = self._kind, self._phase
        self._kind, self._phase = kind, phase or self._phase
        try:
            yield
        finally:
            self._kind, self._phase = former

    def begin_batch(self) -> None:
        """Note that the next batch is made."""
        self.batch += 1
        self._starts.append(self.model.requested)
        self._phase, self._was_called = None, False

    def enter_module(self, module: Any) -> None:
        """Note that a module is called."""
        if not self._modules:
            self._is_model = next(module.parameters(), None) is not None
            self._was_called |= self._is_model
        self._modules.append(module)
        self._boundaries.append((torch._C._autograd._get_sequence_nr(), module))

    def leave_module(self) -> None:
        """Note that the innermost module returns."""
        self._modules.pop()
        self._boundaries.append((torch._C._autograd._get_sequence_nr(), self._modules[-1] if self._modules else None))

    def _current(self) -> FitPhase:
        """Return the phase that runs now."""
        phase = self._phase
        if phase is None:
            if torch._C._current_graph_task_id() >= 0:
                phase = FitPhase.BACKWARD
            elif self.is_stepping and not torch.is_grad_enabled():  # a closure of the step has gradients on
                phase = FitPhase.STEP
            elif not torch.is_grad_enabled():
                phase = FitPhase.VALIDATION
            elif not self._was_called:
                phase = FitPhase.BATCH
            else:
                phase = FitPhase.FORWARD if self._modules and self._is_model else FitPhase.LOSS
        if phase is not self._last and not {phase, self._last} <= _FORWARD:
            self._run += 1
            self.passes += phase is FitPhase.BACKWARD
        self._last = phase
        return phase

    def _module(self) -> Any:
        """Return the module that is called now, or whose backward pass runs."""
        if self._modules:
            return self._modules[-1]
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() >= 0 else None
        if node is None:
            return None
        place = bisect_right(self._boundaries, node._sequence_nr(), key=lambda each: each[0])
        return self._boundaries[place - 1][1] if place else None

    # --- the results -------------------------------------------------------------------------------------------------

    def phases(self) -> tuple[FitPhasePeak, ...]:
        """Return the peak of each phase, in their order in a batch."""
        return tuple(FitPhasePeak(phase, self._phases[phase]) for phase in FitPhase if self._phases[phase])

    def peaks_of_batches(self) -> tuple[int, ...]:
        """Return the peak of each batch, the validation's among them."""
        return tuple(self._batches[number] for number in sorted(self._batches) if number)

    def growth(self) -> int:
        """Return the bytes that each batch leaves on the device beside those of the one before; 0 where one left none."""
        differences = [after - before for before, after in pairwise(self._starts[1:])]  # the first makes the lasting memory
        return differences[0] if len(differences) > 1 and min(differences) > 0 else 0

    def categories(self) -> tuple[CategoryBytes, ...]:
        """Return the bytes allocated at the peak, by category, the largest first; it adds up to the peak."""
        found = Counter({MemoryCategory.HELD: self.held})
        for number, birth in enumerate(islice(self._births, self._births_at_peak)):
            until, run = self._deaths.get(number, (self._births_at_peak, -1))
            if until >= self._births_at_peak:
                found[birth.kind or _category(birth, outlives=run != birth.run)] += birth.nbytes
        return tuple(CategoryBytes(category, nbytes) for category, nbytes in found.most_common() if nbytes)

    def place(self, names: dict[int, str]) -> PeakPlace:
        """Return where the peak is.

        Args:
            names: of the modules, by their ids.
        """
        phase, batch, operator, module = self._place
        return PeakPlace(
            phase=phase,
            batch=batch,
            operator=operator,
            module=names.get(id(module), ""),
            module_class="" if module is None else type(module).__name__,
            line="" if self._line is None else _words(*self._line),
        )


def _category(birth: _Birth, *, outlives: bool) -> MemoryCategory:
    """Return the category of a block by the phase that made it, and whether it outlives that phase."""
    if birth.phase is FitPhase.START:
        return MemoryCategory.PARAMETERS
    if birth.phase is FitPhase.BATCH:
        return MemoryCategory.INPUTS
    if birth.recomputes:
        return MemoryCategory.ACTIVATIONS
    if not outlives:
        return MemoryCategory.TEMPORARIES
    kept = {FitPhase.BACKWARD: MemoryCategory.GRADIENTS, FitPhase.STEP: MemoryCategory.OPTIMIZER_STATE}
    return kept.get(birth.phase, MemoryCategory.ACTIVATIONS)


def _user_frame(frame: Any) -> Any:
    """Return the innermost frame of code that is no training library's, or None without one in the trace."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _TRACE:
            return None
        if _is_users(frame):
            return frame
        frame = frame.f_back
    return None


def _is_users(frame: Any) -> bool:
    """Say whether a frame is of code that is no library's that trains."""
    name = str(frame.f_globals.get("__name__", ""))
    return not f"{name}.".startswith(tuple(f"{module}." for module in (*_CALLERS, *calling_modules())))


def line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised an error, in words; empty if a library's did."""
    lines = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    if not lines:
        return ""
    frame, number = lines[-1]
    return _words(frame.f_code.co_name, str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename, number)


def _words(function: str, module: str, file: str, number: int) -> str:
    """Return a line of code with its place in words."""
    if file == "<cell>":
        return f"line {number} of the cell"
    source = linecache.getline(file, number).strip()
    return f"{function}() in {module}, line {number}" + (f": {source:.80}" if source else "")


def names_of(models: Iterable[Any]) -> dict[int, str]:
    """Return the path of each module of models, by its id."""
    return {id(module): path for model in models for path, module in model.named_modules() if path}
