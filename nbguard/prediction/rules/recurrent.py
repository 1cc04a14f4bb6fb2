"""Cells of recurrent layers: one fused kernel on CUDA, which saves the gates of each step in a workspace.

Source: `lstm_cell` and `gru_cell` in aten/src/ATen/native/RNN.cpp, the kernels in aten/src/ATen/native/cuda/RNN.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
