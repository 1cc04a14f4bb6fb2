"""Trainings that run out of memory, by model, precision and place on the fake device, and by loss and operation on the CPU.

    python -m tests.survive.matrix                                         # on the CPU, values compared
    python -m tests.fake_cuda python -m tests.survive.matrix --device      # on the fake device, which has no values

On the device the capacity lies between the peaks of a whole and of half a batch. `--every N` takes each N-th case alone.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import nbguard
from tests.survive.planted import Planted, largest_difference, net

# --- On the CPU: an error at each operation of a batch that allocates, for ten sets of losses and callbacks.


@cache
def batches() -> tuple[Any, Any, Any]:
    """Return inputs, classes, and classes as ones and zeros, of three batches each."""
    inputs = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(24).reshape(3, 8) % 4
    return inputs, classes, functional.one_hot(classes, 4).float()


Loss = Callable[[Any, Any, Any], Any]
SETS: dict[str, tuple[Loss, frozenset[str]]] = {
    "cross entropy": (lambda p, y, _: functional.cross_entropy(p, y), frozenset()),
    "label smoothing, clip": (lambda p, y, _: functional.cross_entropy(p, y, label_smoothing=0.1), frozenset({"clip"})),
    "class weights, accumulation": (
        lambda p, y, _: functional.cross_entropy(p, y, weight=torch.tensor([1.0, 5.0, 0.1, 2.0])),
        frozenset({"accumulation"}),
    ),
    "sum, clip by value": (lambda p, y, _: functional.cross_entropy(p, y, reduction="sum"), frozenset({"clip by value"})),
    "contrastive": (lambda p, _, __: functional.cross_entropy(p @ p.T / 8, torch.arange(len(p))), frozenset()),
    "binary, scaler": (lambda p, _, h: functional.binary_cross_entropy_with_logits(p, h), frozenset({"scaler"})),
    "squares, EMA": (lambda p, _, h: functional.mse_loss(p, h), frozenset({"ema"})),
    "Huber, schedule": (lambda p, _, h: functional.smooth_l1_loss(p, h), frozenset({"schedule"})),
    "divergence, penalty": (
        lambda p, _, h: functional.kl_div(p.log_softmax(1), h.softmax(1), reduction="batchmean"),
        frozenset({"penalty"}),
    ),
    "triplets, scaler, accumulation": (
        lambda p, _, h: functional.triplet_margin_loss(p, h, h.roll(1, 0)),
        frozenset({"scaler", "accumulation"}),
    ),
}


def host_fit(name: str, at: int, *, batch: int = 1, items: int | None = None) -> tuple[Any, Planted, list[Any]]:
    """Train three batches and validate one; the error is at the so-manieth operation of a batch, or of the validation (3)."""
    (find, extras), (inputs, classes, ones) = SETS[name], batches()
    model, planted = net(), Planted(at)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if "schedule" in extras else 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1, enabled="scaler" in extras)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    figures: dict[Any, Any] = {}
    guard = nbguard.survive(model, optimizer, scaler, items=items)

    @guard
    def passes(number: int) -> None:
        prediction = model(inputs[number])
        loss = find(prediction, classes[number], ones[number])
        if "penalty" in extras:
            loss = loss + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())
        figures[number] = [loss.detach(), (prediction.argmax(1) == classes[number]).float().mean()]
        scaler.scale(loss).backward()

    torch.manual_seed(3)
    with guard, planted:
        for number in range(3):
            planted.is_armed = number == batch
            passes(number)
            planted.is_armed = False
            if "accumulation" in extras and number == 1:
                continue
            scaler.unscale_(optimizer)
            if "clip" in extras:
                figures["norm", number] = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if "clip by value" in extras:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=number == 0)
            schedule.step()
            if "ema" in extras:
                torch._foreach_lerp_(averages, [parameter.detach() for parameter in model.parameters()], 0.1)
        planted.is_armed = batch == 3
        with torch.no_grad():
            figures["validation"] = model(inputs[0])
        planted.is_armed = False
    state = [model.state_dict(), optimizer.state_dict()["state"], scaler.state_dict(), averages, figures, torch.get_rng_state()]
    return state, planted, guard.changes


def on_host(every: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a row for each set of losses and callbacks: errors, largest difference, and whether bits are those of pieces."""
    for name in SETS:
        whole, divided = host_fit(name, 0)[0], host_fit(name, 0, items=4)[0]
        row: Counter[str] = Counter()
        largest = 0.0
        for batch in (0, 1, 2, 3):
            for at in itertools.count(1, every):
                state, planted, changes = host_fit(name, at, batch=batch)
                if not planted.has_raised:
                    break
                row["errors"] += 1
                row["refused"] += any(change.refusal for change in changes)
                largest = max(largest, largest_difference(whole, state))
                if batch == 0:
                    row["of the first batch"] += 1
                    row["same bits"] += largest_difference(divided[:4], state[:4]) == 0
        yield {"case": name, **row, "largest difference": largest}


# --- On the fake device: 12 models, two precisions, four places.

PLACES = ("first batch", "middle", "validation", "last small batch")
_SHAPES = {"wide": (4096, 1024), "deep": (4096, 512), "encoder": (32, 128, 256), "residual": (4096, 768)}
_SHAPES |= {"recurrent": (8192, 256), "linear": (8192, 4096), "dropout": (8192, 1024), "small": (8192, 128)}
_SHAPES |= {"bottleneck": (8192, 2048)}


def on_device(every: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, precision and place: the pieces that it ran in, and the errors that remained."""
    from nbguard.training.survive import pieces
    from tests.cuda.airbag_fits import MODELS

    pieces._is_alike = pieces.same_bits = lambda *_: True  # values of the fake device mean nothing
    torch.zeros(1, device="cuda")
    for name, half, place in itertools.islice(itertools.product(MODELS, (False, True), PLACES), 0, None, every):
        make, shape = MODELS[name]
        yield {
            "case": f"{name}, {'bf16' if half else 'fp32'}, {place}",
            **_on_device(make, _SHAPES.get(name, shape), place, half),
        }


class _OneFigure(nn.Module):  # type: ignore[misc]
    """A model whose output is small, as most are."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Any) -> Any:
        return self.body(x).flatten(1).mean(1, keepdim=True)


def _on_device(make: Callable[[], nn.Module], shape: tuple[int, ...], place: str, half: bool) -> dict[str, Any]:
    from tests.cuda.airbag_fits import free_all, only

    def model_of() -> tuple[nn.Module, Any]:
        with torch.device("cuda"):
            model = _OneFigure(make())
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # its state is there before the peaks are measured
        optimizer.zero_grad()
        return model, optimizer

    def batch(model: nn.Module, items: int, *, trains: bool) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=half), torch.set_grad_enabled(trains):
            loss = model(torch.zeros((items, *shape[1:]), device="cuda")).float().square().mean()
        if trains:
            loss.backward()

    def peak(items: int) -> int:
        free_all()
        model, optimizer = model_of()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        batch(model, items, trains=place != "validation")
        optimizer.step()
        return int(torch.cuda.max_memory_reserved())

    capacity = (peak(shape[0]) + peak(shape[0] // 2)) // 2
    free_all()
    model, optimizer = model_of()
    guard = nbguard.survive(model, optimizer, piecewise_batch_norm=True)
    torch.cuda.empty_cache()
    small = max(1, shape[0] // 8 + 1)
    sizes = {"first batch": [shape[0]] * 3, "middle": [small, shape[0], shape[0], small], "validation": [shape[0]] * 2}
    with suppress(torch.OutOfMemoryError), only(capacity - torch.cuda.memory_reserved()), guard:
        error = "out of memory"
        for items in sizes.get(place, [shape[0], shape[0], small]):
            guard(lambda items=items: batch(model, items, trains=place != "validation"))()
            if place != "validation":
                optimizer.step()
                optimizer.zero_grad()
        error = ""
    size = [change.size for change in guard.changes if change.size]
    return {
        "items": shape[0],
        "of a piece": size[-1] if size else shape[0],
        "moved": sum(change.moved > 0 for change in guard.changes),
        "refused": "; ".join(change.refusal for change in guard.changes if change.refusal),
        "error": error,
    }


def main(arguments: list[str]) -> None:
    """Print a line for each case, and the sums."""
    every = int(arguments[arguments.index("--every") + 1]) if "--every" in arguments else 1
    rows = []
    gc.freeze()  # each error collects garbage, and the libraries have a million objects
    torch.set_num_threads(1)
    for row in (on_device if "--device" in arguments else on_host)(every):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if "--device" in arguments:
        ran = [row for row in rows if not row["error"]]
        print(len(rows), "cases;", len(ran), "finished;", sum(row["of a piece"] < row["items"] for row in ran), "in pieces")
    else:
        errors, most = sum(row.get("errors", 0) for row in rows), max(row["largest difference"] for row in rows)
        same = sum(row.get("same bits", 0) for row in rows), sum(row.get("of the first batch", 0) for row in rows)
        print(errors, "errors;", sum(row["refused"] for row in rows), "refused; largest difference", most, "; same bits", same)


if __name__ == "__main__":
    main(sys.argv[1:])
