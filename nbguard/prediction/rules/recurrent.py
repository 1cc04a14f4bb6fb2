"""Recurrent layers: cells, each one fused kernel on CUDA that saves the gates of a step, and whole layers, which cuDNN runs.

Source: `lstm_cell` and `gru_cell` in aten/src/ATen/native/RNN.cpp, the kernels in aten/src/ATen/native/cuda/RNN.cu;
`_cudnn_rnn` in aten/src/ATen/native/cudnn/RNN.cpp. cuDNN tells the sizes of its reserve and its workspace on a GPU only. So the
trace takes the least that a layer must save for its backward pass, and a band reaches from there to `_MOST`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nbguard.prediction.rules.rule import Allocator, Replacement

_aten = torch.ops.aten
_SAVED = 5
"""Numbers that a GRU's kernel saves for each hidden unit."""


def lstm_cell(tensor: Any, states: Any, of_input: Any, of_hidden: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    """Return the next states (hidden, cell) of an LSTM."""
    hidden, cell = states
    gates = torch.matmul(tensor, of_input.t()), torch.matmul(hidden, of_hidden.t())
    return _aten._thnn_fused_lstm_cell(*gates, cell, input_bias, hidden_bias)[:2]


def gru_cell(tensor: Any, hidden: Any, of_input: Any, of_hidden: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    """Return the next state of a GRU."""
    gates = torch.matmul(tensor, of_input.t()), torch.matmul(hidden, of_hidden.t())
    return _aten._thnn_fused_gru_cell(*gates, hidden, input_bias, hidden_bias)[0]


# --- whole layers -------------------------------------------------------------------------------------------------------------

_LEAST = {"lstm": 5, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers for each hidden unit of each step and item that a layer must save: its gates, and an LSTM's cell."""
_MOST = {"lstm": 12, "gru": 10, "rnn_tanh": 4, "rnn_relu": 4}
"""Numbers that cuDNN's reserve is assumed to have at most instead. Nothing has measured it yet: twice what torch's own keep."""
_WORKSPACE = 8
"""Numbers for each hidden unit of each step and item that cuDNN's workspace is assumed to have at most, beside two weights."""
_DROPOUT = 8 * 2**20
"""Bytes that cuDNN's states of dropout between layers are assumed to take at most."""


class _Layers(torch.autograd.Function):  # type: ignore[misc]
    """Recurrent layers of cuDNN's: a copy of the weights unless they are one buffer, outputs, last states, and the reserve."""

    @staticmethod
    def forward(ctx: Any, plan: LayerPlan, tensor: Any, *others: Any) -> Any:
        dtype = plan.dtype or tensor.dtype
        weights = _meta((0 if plan.is_flat else plan.weights,), dtype)
        out = _meta((*tensor.shape[:-1], plan.outputs), dtype)
        states = [_meta(state.shape, dtype) for state in others[: plan.states]]
        reserve = _meta((plan.least,), dtype) if plan.is_trained else None
        ctx.plan, ctx.dtypes = plan, [each.dtype for each in others]
        ctx.shapes = [each.shape for each in others]
        ctx.save_for_backward(tensor, out, weights, *([] if reserve is None else [reserve]))
        return (out, *states)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        plan, (tensor, *_others) = ctx.plan, ctx.saved_tensors
        needed = ctx.needs_input_grad
        of_tensor = torch.empty_like(tensor) if needed[1] else None
        of_states = [
            _meta(shape, dtype) if is_needed else None
            for shape, dtype, is_needed in zip(ctx.shapes, ctx.dtypes, needed[2 : 2 + plan.states], strict=False)
        ]
        flat = _meta((plan.weights,), ctx.dtypes[-1])
        of_weights, start = [], 0
        for shape in ctx.shapes[plan.states :]:
            of_weights.append(flat[start : start + shape.numel()].view(shape))
            start += shape.numel()
        return None, of_tensor, *of_states, *of_weights


class LayerPlan(NamedTuple):
    """The sizes of recurrent layers, as numbers of elements."""

    dtype: Any  # of mixed precision; None: the input's
    states: int  # tensors of the last states
    outputs: int  # of a step
    weights: int
    is_flat: bool  # the weights are one buffer already: a layer makes them so when it is moved
    least: int  # of the reserve
    most: int  # of the reserve and the workspace
    is_trained: bool


def layers(kind: str, note: Callable[[int], None], dtype: Callable[[], Any], *args: Any) -> Any:
    """Return outputs and last states of layers as cuDNN makes them.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        note: is told the bytes that cuDNN may take beyond those of the trace.
        dtype: returns that of mixed precision, None where it is off.
        args: of the operator: input (and sizes of a packed one), states, weights, and how many layers of which kind.
    """
    is_packed = (
        isinstance(args[1], torch.Tensor) and isinstance(args[2], (list, tuple, torch.Tensor)) and not isinstance(args[3], bool)
    )
    tensor, states, weights, _, count, dropout, is_trained, is_both = (args[0], *args[2:9]) if is_packed else args[:8]
    states = list(states) if isinstance(states, (list, tuple)) else [states]
    hidden, directions = states[-1].shape[-1], 2 if is_both else 1
    steps = tensor.shape[:-1].numel()
    units = steps * hidden * directions * count
    number = sum(weight.numel() for weight in weights)
    plan = LayerPlan(
        dtype=dtype(),
        states=len(states),
        outputs=states[0].shape[-1] * directions,
        weights=number,
        is_flat=dtype() is None and all(weight.is_leaf for weight in weights),
        least=_LEAST[kind] * units,
        most=(_MOST[kind] if is_trained else 0) * units + _WORKSPACE * steps * hidden * directions + 2 * number,
        is_trained=bool(is_trained),
    )
    size = torch.empty((), dtype=plan.dtype or tensor.dtype, device="meta").element_size()
    note((plan.most - (plan.least if is_trained else 0)) * size + (_DROPOUT if dropout and is_trained and count > 1 else 0))
    return _Layers.apply(plan, tensor, *states, *weights)


def _meta(shape: Sequence[int], dtype: Any) -> Any:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


# --- cells --------------------------------------------------------------------------------------------------------------------


def _empty(shape: Sequence[int], like: Any) -> Any:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _lstm(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return both states and the workspace with the gates (`_thnn_fused_lstm_cell_cuda`)."""
    gates, _, cell = args[:3]
    workspace = _empty(gates.shape, gates)
    return _empty(cell.shape, cell), _empty(cell.shape, cell), workspace


def _lstm_backward(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return the gradients of gates, cell and bias (`_thnn_fused_lstm_cell_backward_impl_cuda`)."""
    cell, workspace, has_bias = args[2], args[4], args[5]
    gates = _empty(workspace.shape, workspace)
    return gates, _empty(cell.shape, cell), gates.sum(0) if has_bias else None


def _gru(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return the state and a workspace of five numbers for each hidden unit (`_thnn_fused_gru_cell_cuda`)."""
    hidden = args[2]
    workspace = _empty((hidden.shape[0], hidden.shape[1] * _SAVED), hidden)
    return _empty(hidden.shape, hidden), workspace


def _gru_backward(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return the gradients of gates, state and biases (`_thnn_fused_gru_cell_backward_cuda`)."""
    gradient, has_bias = args[0], args[2]
    gates = [_empty((gradient.shape[0], gradient.shape[1] * 3), gradient) for _ in range(2)]
    of_hidden = _empty(gradient.shape, gradient)
    return *gates, of_hidden, *(each.sum(0) if has_bias else None for each in gates)


REPLACED: dict[Any, Replacement] = {
    _aten._thnn_fused_lstm_cell.default: _lstm,
    _aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    _aten._thnn_fused_gru_cell.default: _gru,
    _aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}
