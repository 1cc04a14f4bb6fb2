"""The operators of a traced fit as CUDA runs them, with kernels' own memory by rule, and values read where there are none."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nbguard.errors import UnpredictableError, in_one_line
from nbguard.libraries import calling_modules, learner_packages
from nbguard.memory.scan.devices.kept_memory import cublaslt_workspace, keeps_workspaces
from nbguard.memory.scan.storage_events import LightMode, is_autograds
from nbguard.training.prediction.emulation.recorder import RecordingDevice
from nbguard.training.prediction.hardware import Gpu, WorkspaceCounts
from nbguard.training.prediction.prediction import MemoryCategory
from nbguard.training.prediction.rules import REPLACED, TEMPORARIES, UNKNOWN
from nbguard.training.prediction.rules.rule import nbytes

# --- Operators without a kernel of their own. PyTorch composes them of others below autograd, and each takes memory.
#
# A trace sees them as one operator. It calls PyTorch's own composition instead, whose steps it then sees one by one.


_aten = torch.ops.aten
COMPOSED = frozenset(
    {
        _aten._trilinear.default,  # of bilinear layers (aten/src/ATen/native/Linear.cpp)
        _aten.affine_grid_generator.default,  # AffineGridGenerator.cpp
        _aten.dist.default,  # Distance.cpp
        _aten.norm.Scalar,  # ReduceOps.cpp
        _aten.soft_margin_loss.default,  # Loss.cpp
        _aten.soft_margin_loss.out,
        _aten.soft_margin_loss_backward.default,
        _aten.soft_margin_loss_backward.grad_input,
    }
)


def compose(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the outputs of the composition, the one of a backend without any kernel."""
    return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)


# --- CUDA's autocast for tensors without data, with the same casts at the same place, by kernels on a spare dispatch key.
#
# PyTorch has autocast kernels for the tensors of each kind of device, and none for meta tensors. Here the operators of
# CUDA's
# lists get kernels on the key of a backend that nobody uses (`AutocastPrivateUse1`), which `torch.autocast("cuda")`
# switches on
# while a fit is traced. Callers in C++ meet them as those in Python. The lists: aten/src/ATen/autocast_mode.h.


_KEY = "AutocastPrivateUse1"
_LOWER = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention"""
_FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa"""
_FLOAT32_OUT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

Kernel = Callable[..., Any]


class Autocast:
    """The state of CUDA's autocast in one thread, and the kernels that act on it while `installed`."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        """The type that matrix products and convolutions cast to, or None while autocast is off."""
        self._stack: list[torch.dtype | None] = []
        self._weights: dict[int, tuple[Any, Any]] = {}
        self._library: Any = None

    def install(self) -> None:
        """Register the kernels."""
        fallback = torch.library.Library("_", "IMPL")
        fallback.m.fallback_fallthrough(_KEY)  # the library's own `fallback` is missing in 2.4
        library = torch.library.Library("aten", "IMPL")
        for operator, make in self._kernels():
            library.impl(operator, make(operator), _KEY)
        self._library = library, fallback

    def remove(self) -> None:
        """Take the kernels out again."""
        self._switch(None)
        self._weights.clear()
        for library in self._library or ():
            library._destroy()
        self._library = None

    def enter(self, dtype: torch.dtype | None) -> None:
        """Cast to `dtype` from here on, or to nothing (None)."""
        self._stack.append(self.dtype)
        self._switch(dtype)

    def leave(self) -> None:
        """Go on as before the last `enter`; the outermost lets the cast weights go."""
        self._switch(self._stack.pop())
        if not self._stack:
            self._weights.clear()

    def _switch(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, dtype is None)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, dtype is not None)

    def _kernels(self) -> Iterator[tuple[Any, Callable[[Any], Kernel]]]:
        for names, make in (
            (_LOWER, self._lower),
            (_FLOAT32, self._float32),
            (_FLOAT32_OUT, self._float32_out),
            (_WIDEST, self._widest),
        ):
            for name in names.split():
                operator, _, overload = name.partition(".")
                packet = getattr(torch.ops.aten, operator, None)
                op_overload = getattr(packet, overload or "default", None)
                if op_overload is not None:
                    yield op_overload, make

    def _lower(self, operator: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                return operator(*self._cast_all(args, self.dtype), **self._cast(kwargs, self.dtype))

        return kernel

    def _float32(self, operator: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                return operator(*self._cast_all(args, torch.float32), **self._cast(kwargs, torch.float32))

        return kernel

    def _float32_out(self, operator: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                if _is_eligible(args[0]) and kwargs.get("dtype") is None and not _has_dtype(operator, args):
                    return operator(*args, **kwargs | {"dtype": torch.float32})
                return operator(*args, **kwargs)

        return kernel

    def _widest(self, operator: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                tensors = [value for value in _flat((args, kwargs)) if _is_eligible(value)]
                dtype = torch.float32 if any(value.dtype == torch.float32 for value in tensors) else self.dtype
                return operator(*self._cast_all(args, dtype), **self._cast(kwargs, dtype))

        return kernel

    def _cast_all(self, args: Any, dtype: torch.dtype | None) -> list[Any]:
        """Return arguments cast from the last to the first, as the compiled wrappers do it: order decides about addresses."""
        return [self._cast(value, dtype) for value in reversed(args)][::-1]

    def _cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, torch.Tensor):
            return self._cast_tensor(value, dtype) if _is_eligible(value) and value.dtype != dtype else value
        if type(value) in (tuple, list):
            return type(value)(self._cast(each, dtype) for each in value)
        if type(value) is dict:
            return {name: self._cast(each, dtype) for name, each in value.items()}
        return value

    def _cast_tensor(self, tensor: Any, dtype: torch.dtype | None) -> Any:
        """Return the tensor in another type. A weight is cast once, until the outermost autocast ends."""
        is_weight = (
            dtype == self.dtype
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not is_weight:
            return tensor.to(dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(dtype)
        return self._weights[id(tensor)][1]


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY)))


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point() and value.dtype != torch.float64


def _has_dtype(operator: Any, args: Any) -> bool:
    """Return whether an operator's optional `dtype` is given by place."""
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype") if "dtype" in names else len(names)
    return len(args) > place and args[place] is not None


def _flat(value: Any) -> Iterator[Any]:
    if type(value) in (tuple, list):
        for each in value:
            yield from _flat(each)
    elif type(value) is dict:
        yield from _flat(tuple(value.values()))
    else:
        yield value


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
"""Operators that call cuBLAS, and need a workspace, which their thread keeps or which torch takes for each call."""
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


class OperatorMode(LightMode):
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
        self.convolutions: int = 0
        """Number of calls of cuDNN's convolutions, whose workspaces are not known."""
        self.attentions: int = 0
        """Number of calls of attention that cuDNN may run, whose workspaces are not known."""
        self.layers: Counter[int] = Counter()
        """By batch: bytes that cuDNN's recurrent layers may take beyond those of the trace."""
        self.unknown: dict[str, int] = {}
        """Kinds of operators that were called and take memory by no known rule: most bytes of tensors that one was given."""
        self._device = device
        self._workspaces: list[int] = []
        self._with_cublas, self._with_cublaslt = (set((False, True)[:number]) for number in workspaces)  # is it autograd's?
        self._lt_workspace = cublaslt_workspace(torch)
        self._keeps_workspaces = keeps_workspaces(torch)

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
        """Return the bytes of cuBLAS's workspaces that are kept to the end, one for each thread that multiplies matrices."""
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
            self._take_workspaces(self._lt_workspace if func in _WITH_BIAS and _is_lts(*args[:3], **kwargs) else None)
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

    def _take_workspaces(self, of_lt: int | None) -> None:
        """Take cuBLAS's workspace and that many bytes for cuBLASLt, which does without cuBLAS's where torch keeps neither."""
        if not self._keeps_workspaces:
            with self._device.making(MemoryCategory.WORKSPACES):
                self._device.died(self._device.born(of_lt or self.gpu.cublas_workspace, None, is_older=False))
            return
        self._make_workspace(self._with_cublas, self.gpu.cublas_workspace)
        if of_lt:
            self._make_workspace(self._with_cublaslt, of_lt)

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
