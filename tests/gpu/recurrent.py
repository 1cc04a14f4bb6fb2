"""Sizes of cuDNN's reserve and workspaces of recurrent layers on this machine's GPU, as data for `tests/data/recurrent`.

python -m tests.gpu.recurrent FILE
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_CLASSES = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
_LAYERS = ((1, False), (1, True), (2, False), (3, True))
_WIDTHS = ((64, 32), (128, 128), (512, 400), (1152, 400), (1000, 37))
_BATCHES = ((8, 20), (64, 72), (1, 200), (33, 7))


class _Outputs(TorchDispatchMode):
    """Notes the sizes of all that cuDNN's operator returns, in bytes."""

    reserve = buffer = outputs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._cudnn_rnn.default:
            sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in out}
            self.outputs = sum(sizes.values())
            self.reserve, self.buffer = (each.untyped_storage().nbytes() for each in out[3:])
        return out


def _cases() -> Iterator[dict[str, Any]]:
    plain = {"dtype": "float32", "dropout": 0.0, "train": True, "flat": True, "packed": False}
    for kind in _CLASSES:
        for (layers, both), (hidden, width), (batch, steps) in itertools.product(_LAYERS, _WIDTHS, _BATCHES):
            sizes = {"layers": layers, "both": both, "hidden": hidden, "width": width, "batch": batch, "steps": steps}
            yield {"kind": kind, **sizes, **plain}
        two = {"kind": kind, "layers": 2, "both": False, "hidden": 512, "width": 400, "batch": 64, "steps": 72}
        yield from ({**two, **plain, "dtype": dtype} for dtype in ("float16", "bfloat16"))
        yield from ({**two, **plain, "dropout": 0.3, "both": both} for both in (False, True))
        yield from ({**two, **plain, "train": False, "flat": flat} for flat in (False, True))
        yield {**two, **plain, "flat": False}
        yield {**two, **plain, "packed": True}


def _measured(case: dict[str, Any]) -> dict[str, Any]:
    torch.cuda.empty_cache()
    dtype = getattr(torch, case["dtype"])
    made = _CLASSES[case["kind"]](
        case["width"], case["hidden"], case["layers"], bidirectional=case["both"], dropout=case["dropout"]
    )
    net = made.cuda().to(dtype).train(case["train"])
    if not case["flat"]:
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
    steps, batch = case["steps"], case["batch"]
    data: Any = torch.randn(steps, batch, case["width"], device="cuda", dtype=dtype, requires_grad=case["train"])
    units = steps * batch
    if case["packed"]:
        lengths = torch.linspace(steps, 1, batch).long()
        data, units = nn.utils.rnn.pack_padded_sequence(data, lengths), int(lengths.sum())
    with torch.set_grad_enabled(case["train"]):
        net(data)  # cuDNN's handles, and the states of dropout
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with _Outputs() as made_by:
            out = net(data)[0]
        torch.cuda.synchronize()
        forward = torch.cuda.max_memory_allocated() - before
        backward = 0
        if case["train"]:
            values = out.data if case["packed"] else out
            gradient = torch.ones_like(values)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            values.backward(gradient)
            torch.cuda.synchronize()
            backward = torch.cuda.max_memory_allocated() - before
    sizes = {"reserve": made_by.reserve, "buf": made_by.buffer, "outputs": made_by.outputs}
    weights = sum(parameter.numel() for parameter in net.parameters())
    peaks = {"forward_peak": forward, "backward_peak": backward}
    return {**case, "units": units, "weights": weights, "item": dtype.itemsize, **sizes, **peaks}


def main() -> None:
    """Measure all cases and write them."""
    warnings.simplefilter("ignore")
    columns = (
        *("kind", "layers", "both", "hidden", "units", "dtype", "dropout", "train", "flat", "weights", "item"),
        *("reserve", "buf", "outputs", "forward_peak", "backward_peak"),
    )
    rows = [[row[column] for column in columns] for row in map(_measured, _cases())]
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    lines = ",\n".join(map(json.dumps, rows))
    Path(sys.argv[1]).write_text(f'{json.dumps({**head, "columns": columns})[:-1]}, "rows": [\n{lines}\n]}}\n')
    print(f"{len(rows)} cases of recurrent layers in {sys.argv[1]}")


if __name__ == "__main__":
    main()
