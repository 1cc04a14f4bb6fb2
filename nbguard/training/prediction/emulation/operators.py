"""The operators of a traced fit as CUDA runs them, with kernels' own memory by rule, and values read where there are none."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nbguard.errors import UnpredictableError, in_one_line
from nbguard.libraries import calling_modules, learner_packages
from nbguard.memory.scan.devices.kept_memory import cublaslt_workspace
from nbguard.memory.scan.storage_events import is_autograds
from nbguard.training.prediction.emulation.recorder import RecordingDevice
from nbguard.training.prediction.hardware import Gpu, WorkspaceCounts
from nbguard.training.prediction.prediction import MemoryCategory
from nbguard.training.prediction.rules import REPLACED, TEMPORARIES, UNKNOWN
from nbguard.training.prediction.rules.composed import COMPOSED, compose
from nbguard.training.prediction.rules.rule import nbytes

_aten = torch.ops.aten
_OutOfMemoryError: Any = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError
_GEMMS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        ("mm", "default"),
        ("addmm", "default"),
        ("bmm", "default"),
        ("baddbmm", "default"),
        ("addmv", "default"),
        ("mv", "default"),
        ("dot", "default"),
        ("addbmm", "default"),
        ("_addmm_activation", "default"),
    )
    if hasattr(_aten, name)
)
"""Operators that call cuBLAS, and make its workspace where their thread has none yet."""
_WITH_BIAS = frozenset({_aten.addmm.default, _aten._addmm_activation.default})
"""Those of them that may call cuBLASLt instead."""
_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
_IN_PLACE = {
    _aten.index_add.default: _aten.index_add_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.index_put.default: _aten.index_put_.default,
}
"""Operators that autograd fills a new tensor with zeros by: on CUDA in place, under a mode with another tensor."""
_FLASH = _aten._scaled_dot_product_flash_attention.default
_HOPPER = (9, 0)
"""From this architecture on PyTorch prefers cuDNN's attention for half precision (`check_prefer_cudnn_attention`)."""
_TRUSTED = ("torch", "nbguard")
"""Packages whose reads of values do not decide about memory, besides those that call the user's code in a fit: metrics,
recorders, the gradient scaler."""
_PADDED = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""Modules that ask whether a batch has padding. The answer is that it has: its mask takes memory, so the figure is a bound."""


class OperatorMode(TorchDispatchMode):  # type: ignore[misc]
    """Runs operators on meta tensors with the memory of CUDA's kernels. Enter it above the mode that follows storages.

    Args:
        device: the modelled allocator.
        gpu: decides about sizes of buffers.
        workspaces: those of cuBLAS that are there already.
    """

    supports_higher_order_operators = True  # else torch refuses them while a mode is entered

    def __init__(self, device: RecordingDevice, gpu: Gpu, workspaces: WorkspaceCounts) -> None:
        super().__init__()
        self.gpu = gpu
        self.reads: Counter[str] = Counter()
        self.on_host: Counter[str] = Counter()
        """Lines of the user's code that read values which tensors without data do not have."""
        self.convolutions = 0
        """Number of calls of cuDNN's convolutions, whose workspaces are not known."""
        self.attentions = 0
        """Number of calls of attention that cuDNN may run, whose workspaces are not known."""
        self.layers: Counter[int] = Counter()
        """By batch: bytes that cuDNN's recurrent layers may take beyond those of the trace."""
        self.unknown: dict[str, int] = {}
        """Kinds of operators that were called and take memory by no known rule: most bytes of tensors that one was given."""
        self._device = device
        self._workspaces: list[int] = []
        self._with_cublas, self._with_cublaslt = (set((False, True)[:number]) for number in workspaces)  # is it autograd's?
        self._lt_workspace = cublaslt_workspace(torch)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method, and its first call imports the whole compiler

    def temporaries(self, *sizes: int) -> None:
        """Allocate buffers of these bytes one after the other, then free them."""
        with self.buffers(*sizes):
            pass

    @contextmanager
    def buffers(self, *sizes: int) -> Iterator[None]:
        """Allocate buffers of these bytes one after the other; they live in the context."""
        with self._device.making(MemoryCategory.TEMPORARIES):
            tokens = [self._device.born(size, None, is_older=False) for size in sizes if size]
        try:
            yield
        finally:
            for token in tokens:
                self._device.died(token)

    @property
    def workspaces(self) -> int:
        """Return the bytes of cuBLAS's workspaces: one for each thread that multiplies matrices, kept to the end."""
        return sum(self._workspaces)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_originals(args)
        host = _HOST_READS.get(func)
        if host is not None and (out := host(self, args, kwargs)) is not NotImplemented:
            return out
        func = _IN_PLACE[func] if _is_filling(func, args) and is_autograds() else func
        if func in COMPOSED:
            with self:
                return compose(func, args, kwargs)
        replaced = REPLACED.get(func)
        out = NotImplemented if replaced is None else replaced(self, func, args, kwargs)
        if out is NotImplemented:
            out = self._called(func, args, kwargs)
        if func in _GEMMS:
            self._make_workspace(self._with_cublas, self.gpu.cublas_workspace)
            if self._lt_workspace and func in _WITH_BIAS and _is_lts(*args[:3], **kwargs):
                self._make_workspace(self._with_cublaslt, self._lt_workspace)
        if func in _CONVOLUTIONS:
            self.convolutions += 1
        if func is _FLASH and self.gpu.architecture >= _HOPPER:
            self.attentions += 1
        if func in UNKNOWN:
            kind, given = UNKNOWN[func], sum(nbytes(each) for each in args if isinstance(each, torch.Tensor))
            self.unknown[kind] = max(self.unknown.get(kind, 0), given)
        temporaries = TEMPORARIES.get(func)
        if temporaries is not None:
            self.temporaries(*temporaries(self.gpu, args, kwargs))
        return out

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator. One of somebody's own may say by any RuntimeError that it tells no shapes."""
        try:
            return func(*args, **kwargs)
        except _OutOfMemoryError:
            raise
        except RuntimeError as error:
            if func.namespace == "aten" and not isinstance(error, NotImplementedError):
                raise
            reason = in_one_line(error)
        raise UnpredictableError(f"{func} needs real data, so the memory after it cannot be predicted ({reason})")

    def _make_workspace(self, threads: set[bool], nbytes: int) -> None:
        """Make a workspace of this thread, if it has none: autograd's backward pass runs in one of its own on CUDA."""
        is_backward = torch._C._current_graph_task_id() >= 0
        if is_backward not in threads:
            threads.add(is_backward)
            self._workspaces.append(nbytes)
            with self._device.making(MemoryCategory.WORKSPACES):
                self._device.born(nbytes, None, is_older=False)

    def note_layers(self, nbytes: int) -> None:
        """Note the bytes that recurrent layers may take beyond those of the trace."""
        self.layers[self._device.batch] += nbytes

    def note_read(self) -> None:
        """Note the line of the user's code that reads a value."""
        self._note(self.reads)

    def note_host(self) -> None:
        """Note the line of the user's code where a tensor of the host meets the model's."""
        self._note(self.on_host)

    def _note(self, lines: Counter[str]) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name.partition(".")[0] not in (*_TRUSTED, *calling_modules()) and name not in _PADDED:
                break
            if name.startswith((*(f"{package}." for package in learner_packages()), "torch.amp.", *_PADDED)):
                return
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            lines[f"{frame.f_code.co_name}() in {name}, line {frame.f_lineno}"] += 1


def _is_lts(bias: Any, _: Any, weight: Any, *, beta: float = 1, **_others: Any) -> bool:
    """Say whether cuBLASLt multiplies with a bias: `isInputCompliesAddmmCudaLt` in aten/src/ATen/native/cuda/Blas.cpp."""
    return beta == 1 and bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == weight.shape[1] and min(weight.shape) > 1


def _is_filling(func: Any, args: Any) -> bool:
    """Say whether an operator may be autograd's to fill zeros: values are put in their places by adding them up there only."""
    return func in _IN_PLACE and (func is not _aten.index_put.default or (len(args) > 3 and args[3]))


def _refuse_originals(values: Any) -> None:
    """Refuse an operation on the user's own data: a tensor that is on a device, or a parameter with numbers.

    Raises:
        UnpredictableError: the fit refers to it in a way that its copy does not follow.
    """
    for value in values:
        if type(value) in (list, tuple):
            _refuse_originals(value)
        elif isinstance(value, torch.Tensor) and not value.is_meta:
            is_on_device = value.device.type != "cpu"
            if is_on_device or type(value) is torch.nn.Parameter:
                what = f"tensor of {tuple(value.shape)}" if is_on_device else f"parameter of {tuple(value.shape)}"
                raise UnpredictableError(
                    f"a {what} on {value.device} is used, but no argument, global name or closure of the fit's own "
                    "functions leads to it; pass it as an argument"
                )


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _scalar(mode: OperatorMode, args: Any, _: Any) -> Any:
    if not _is_meta(args[0]):
        return NotImplemented
    mode.note_read()
    dtype = args[0].dtype
    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _to_host(_: OperatorMode, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if not _is_meta(args[0]) or device is None or torch.device(device).type != "cpu":
        return NotImplemented
    return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


def _copied_to_host(_: OperatorMode, args: Any, __: Any) -> Any:
    return args[0].zero_() if _is_meta(args[1]) and not _is_meta(args[0]) else NotImplemented


def _equal(mode: OperatorMode, args: Any, _: Any) -> Any:
    if not _is_meta(args[0]):
        return NotImplemented
    mode.note_read()
    return True


def _finite_check(_: OperatorMode, args: Any, __: Any) -> Any:
    return None if any(map(_is_meta, args[0])) else NotImplemented


def _scale_update(_: OperatorMode, args: Any, __: Any) -> Any:
    return args[0] if _is_meta(args[0]) else NotImplemented


_HOST_READS: dict[Any, Callable[[OperatorMode, Any, Any], Any]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten._to_copy.default: _to_host,
    _aten.copy_.default: _copied_to_host,
    _aten.equal.default: _equal,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _finite_check,
    _aten._amp_update_scale_.default: _scale_update,
}
