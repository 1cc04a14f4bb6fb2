"""Recurrent layers: cells, each one fused kernel on CUDA that saves the gates of a step, and whole layers, which cuDNN runs.

Source: `lstm_cell` and `gru_cell` in aten/src/ATen/native/RNN.cpp, the kernels in aten/src/ATen/native/cuda/RNN.cu;
`_cudnn_rnn` in aten/src/ATen/native/cudnn/RNN.cpp. cuDNN tells the sizes of its reserve and its workspaces on a GPU only. They
were measured on an H200 with cuDNN 9.19 (`tests/data/recurrent/h200.json`, made by `tests/gpu/recurrent.py`): a rule gives the
reserve to 256 bytes, and an upper bound the workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nbguard.training.prediction.rules.rule import Allocator, Replacement

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

_GATES = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers that cuDNN's reserve has for each hidden unit of each step and item in each layer, beside one between two layers."""
_ALIGNMENT = 256
"""Additional bytes of the reserve."""
_FIXED = 10 * 2**20
"""Bytes of the workspace for each layer and direction at most (8.9 MiB were measured)."""
_TEMPORARY = 28
"""Numbers of the workspace for each hidden unit of each step and item in each direction at most (25 were measured)."""
_DROPOUT = 8 * 2**20
"""Bytes that cuDNN's states of dropout between layers are assumed to take at most."""


class LayerSizes(NamedTuple):
    """Bytes that cuDNN takes for recurrent layers, besides weights, outputs and gradients."""

    reserve: int  # kept from the forward pass in training to the backward pass
    workspace: int  # at most, while either of them runs


def sizes_of(
    kind: str, *, layers: int, directions: int, cells: int, weights: int, item: int, has_dropout: bool = False
) -> LayerSizes:
    """Return the sizes of recurrent layers.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        layers: how many there are, one on the other.
        directions: 2 for bidirectional ones, else 1.
        cells: hidden units of one layer and direction, times steps, times items of the batch.
        weights: numbers of all layers' weights and biases.
        item: bytes of a number.
        has_dropout: whether there is dropout between the layers.
    """
    inner = cells * directions
    mask = (layers - 1) * inner * directions // 8 if has_dropout else 0
    reserve = (_GATES[kind] * layers + layers - 1) * inner * item + mask + _ALIGNMENT
    return LayerSizes(reserve, (_TEMPORARY * inner + weights) * item + _FIXED * layers * directions)


class _Layers(torch.autograd.Function):  # type: ignore[misc]
    """Recurrent layers of cuDNN's: a copy of the weights unless they are one buffer, outputs, last states, and the reserve."""

    @staticmethod
    def forward(ctx: Any, plan: LayerPlan, tensor: Any, *others: Any) -> Any:
        dtype = plan.dtype or tensor.dtype
        weights = _meta((0 if plan.is_flat else plan.weights,), dtype)
        out = _meta((*tensor.shape[:-1], plan.outputs), dtype)
        states = [_meta(state.shape, dtype) for state in others[: plan.states]]
        reserve = _meta((plan.reserve,), torch.uint8) if plan.is_trained else None
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

    dtype: Any  # of mixed precision; None for the input's
    states: int  # tensors of the last states
    outputs: int  # of a step
    weights: int
    is_flat: bool  # the weights are one buffer already: a layer makes them so when it is moved
    reserve: int  # bytes
    is_trained: bool


def layers(kind: str, note: Callable[[int], None], dtype: Callable[[], Any], *args: Any) -> Any:
    """Return outputs and last states of layers as cuDNN makes them.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        note: is told the bytes that cuDNN may take beyond those of the trace.
        dtype: returns mixed precision's type, or None where it is off.
        args: of the operator: input (and sizes of a packed one), states, weights, and the number and kind of layers.
    """
    is_packed = (
        isinstance(args[1], torch.Tensor) and isinstance(args[2], (list, tuple, torch.Tensor)) and not isinstance(args[3], bool)
    )
    tensor, states, weights, _, count, dropout, is_trained, is_both = (args[0], *args[2:9]) if is_packed else args[:8]
    states = list(states) if isinstance(states, (list, tuple)) else [states]
    hidden, directions = states[-1].shape[-1], 2 if is_both else 1
    steps = tensor.shape[:-1].numel()
    number = sum(weight.numel() for weight in weights)
    item = torch.empty((), dtype=dtype() or tensor.dtype, device="meta").element_size()
    has_dropout = bool(dropout and is_trained and count > 1)
    sizes = sizes_of(
        kind,
        layers=count,
        directions=directions,
        cells=steps * hidden,
        weights=number,
        item=item,
        has_dropout=has_dropout,
    )
    plan = LayerPlan(
        dtype=dtype(),
        states=len(states),
        outputs=states[0].shape[-1] * directions,
        weights=number,
        is_flat=dtype() is None and all(weight.is_leaf for weight in weights),
        reserve=sizes.reserve,
        is_trained=bool(is_trained),
    )
    note(sizes.workspace + (_DROPOUT if has_dropout else 0))
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
