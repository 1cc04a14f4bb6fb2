"""CUDA's autocast for tensors without data, with the same casts at the same place, by kernels on a spare dispatch key.

PyTorch has autocast kernels for the tensors of each kind of device, and none for meta tensors. Here the operators of CUDA's
lists get kernels on the key of a backend that nobody uses (`AutocastPrivateUse1`), which `torch.autocast("cuda")` switches on
while a fit is traced. Callers in C++ meet them as those in Python. The lists: aten/src/ATen/autocast_mode.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

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
        fallback.fallback(torch.library.fallthrough_kernel, _KEY)
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
