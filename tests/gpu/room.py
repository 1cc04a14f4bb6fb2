"""Four ways on where a GPU is full, and their price: `python -m tests.gpu.room`, a step of the GPU day.

A device that is full is made by taking the rest of it. Each way is checked (weights bit-equal under the airbag, bytes after a
move), then timed beside the same work without it, in one run. On the fake runtime kernels compute nothing and a copy
takes no time of a GPU: there it shows that each part runs, and its times mean nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import nbguard
from nbguard.memory.room.airbag import airbag_now
from nbguard.memory.room.garage import garage_now
from nbguard.memory.room.spill_watch import relieve
from nbguard.memory.scan.scan import Notebook
from nbguard.training.survive import pieces
from nbguard.units import MiB, format_bytes

GIB = 1024 * MiB
NAMES: dict[str, Any] = {}
"""The notebook's names."""
_STEPS, _TRIES = 3, 5


def _seconds(act: Callable[[], Any], tries: int = 1) -> float:
    """Return the least seconds that something takes, the device's work included."""
    least = float("inf")
    for _ in range(tries):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        act()
        torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begun)
    return least


@contextmanager
def _only(nbytes: int) -> Iterator[None]:
    """Leave so many bytes of the device free; nothing of PyTorch's takes the rest."""
    import ctypes

    gc.collect()
    torch.cuda.empty_cache()
    driver, taken = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    size = torch.cuda.mem_get_info()[0] - nbytes
    error = driver.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(size))
    assert not error, f"the driver gives no {format_bytes(size)}: error {error}"
    try:
        yield
    finally:
        driver.cuMemFree_v2(taken)


def _free_all() -> None:
    NAMES.clear()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


class _Training:
    """A training whose steps are the same each time it is made."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU()))).cuda()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.x = torch.randn(batch, width, device="cuda")

    def step(self) -> None:
        """Make one step."""
        self.opt.zero_grad()
        self.net(self.x).square().mean().backward()
        self.opt.step()

    def weights(self) -> list[Any]:
        """Return copies of the weights on the host."""
        return [parameter.detach().cpu() for parameter in self.net.parameters()]


def _without_limit(width: int, batch: int) -> tuple[list[Any], int, float]:
    """Return a training's weights after some steps, the bytes that it had reserved, and the seconds of a step."""
    training = _Training(width, batch)
    for _ in range(_STEPS):
        training.step()
    expected, peak = training.weights(), torch.cuda.max_memory_reserved()
    plain = _seconds(training.step, _TRIES)
    del training
    _free_all()
    return expected, peak, plain


def move(unit: int) -> Iterator[str]:
    """Make room in a device full of pieces; yield the figures."""
    with _only(16 * unit):
        whole = [torch.empty(unit, dtype=torch.uint8, device="cuda") for _ in range(15)]
        del whole
        teeth = NAMES["teeth"] = [torch.empty(unit // 4, dtype=torch.uint8, device="cuda") for _ in range(60)][::4]
        for number, tooth in enumerate(teeth):
            tooth.fill_(number)
        before = [tooth.untyped_storage()._cdata for tooth in teeth]
        made = nbguard.make_room(5 * unit, namespace=NAMES)
        assert made.state == "made", made
        assert [tooth.untyped_storage()._cdata for tooth in teeth] == before
        NAMES["big"] = torch.empty(5 * unit, dtype=torch.uint8, device="cuda")
        moved = made.nbytes
        assert made.seconds is not None
        yield f"moved out and back: {format_bytes(moved)} in {made.seconds:.3f} s, {made.seconds / moved * GIB:.2f} s a GiB"
        del NAMES["big"]
        host = torch.empty(moved, dtype=torch.uint8, pin_memory=not _is_fake())
        device = torch.empty(moved, dtype=torch.uint8, device="cuda")
        plain = _seconds(lambda: host.copy_(device), _TRIES) + _seconds(lambda: device.copy_(host), _TRIES)
        yield f"beside it, pinned copies of as many bytes out and in: {plain / moved * GIB:.2f} s a GiB"
        if not _is_fake():
            assert all(bool((tooth == number).all()) for number, tooth in enumerate(teeth)), "the bytes are as they were"


def airbag(width: int, batch: int) -> Iterator[str]:
    """Train with a part of the memory outside; yield the figures."""
    expected, peak, plain = _without_limit(width, batch)
    for lacks in (0.1, 0.25, 0.5):
        nbguard.airbag(2 * peak, NAMES)
        on = airbag_now()
        assert on is not None
        with _only(int((1 - lacks) * peak)):
            training = NAMES["training"] = _Training(width, batch)
            for _ in range(_STEPS):
                training.step()
            assert all(map(torch.equal, expected, training.weights())), "the weights have the same bits"
            slow, outside = _seconds(training.step, _TRIES), on.spilled_at_least
            relieve(on, Notebook.current(NAMES))
            left = on.spilled
            del training
            NAMES.clear()
        gc.collect()
        relieve(on, Notebook.current(NAMES))
        assert not on.spilled, "with room for all of it nothing stays"
        _free_all()
        nbguard.airbag("off", NAMES)
        times, share = slow / plain, outside / GIB
        yield (
            f"airbag, {lacks:.0%} lacking: same bits, {times:.1f} times the time of a step with {format_bytes(outside)} outside"
            + (f", {(times - 1) / share:.1f} times more a GiB" if share else "")
            + f"; {format_bytes(left)} stayed while there was no room"
        )


def survive(width: int, batch: int) -> Iterator[str]:
    """Train where half of the batch fits; yield the figures."""
    expected, peak, plain = _without_limit(width, batch)
    with _only(int(0.8 * peak)):
        training = NAMES["training"] = _Training(width, batch)
        guard = nbguard.survive(training.net, training.opt)
        step = guard(training.step)
        for _ in range(_STEPS):
            step()
        furthest = max(float((a - b).abs().max()) for a, b in zip(expected, training.weights(), strict=True))
        most = max((change.pieces for change in guard.changes), default=0)
        with nbguard.survive(training.net, training.opt, items=batch // max(most, 1)):
            slow = _seconds(training.step, _TRIES)
        del training, step, guard
        NAMES.clear()
    assert most > 1, "half of the batch at a time"
    yield f"survived in {most} pieces: {slow / plain:.2f} times the time of a step, weights at most {furthest:.0e} apart"


def garage(nbytes: int) -> Iterator[str]:
    """Let three models take turns within the room of two; yield the figures."""
    width = 1024
    count = max(1, nbytes // (4 * width * width))
    nbguard.budget(int(2.5 * nbytes), NAMES)
    on = garage_now()
    assert on is not None
    x = torch.zeros(1, width, device="cuda")
    for name in "abc":
        net = nn.Sequential(*(nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(count)))
        NAMES[name] = net.requires_grad_(False).to("cuda")
    on.begin()
    for name in "abcabc":
        NAMES[name](x)
    taken = [(turn.nbytes, turn.seconds) for turn in on.turns if turn.seconds]
    assert len(taken) >= 4, on.turns
    nbguard.budget("off")
    total, seconds = sum(nbytes for nbytes, _ in taken), sum(seconds for _, seconds in taken)
    yield f"turns: {len(taken)} returns of {format_bytes(taken[0][0])}, {seconds / total * GIB:.2f} s a GiB (a return alone)"
    for name in "abc":
        NAMES[name](x)


def _is_fake() -> bool:
    from tests.fake_cuda.launch import DEVICE_NAME

    return torch.cuda.get_device_name().startswith(DEVICE_NAME)


PARTS: dict[str, Callable[[bool], Iterator[str]]] = {
    "move": lambda is_fake: move((64 if is_fake else 1024) * MiB),
    "airbag": lambda is_fake: airbag(*((1024, 1024) if is_fake else (4096, 16384))),
    "survive": lambda is_fake: survive(*((512, 4096) if is_fake else (4096, 32768))),
    "garage": lambda is_fake: garage((64 if is_fake else 4096) * MiB),
}


def main() -> int:
    """Print the figures of each part; return 1 if one failed."""
    torch.zeros(1, device="cuda")
    is_fake, failed = _is_fake(), []
    if is_fake:
        pieces._is_alike = lambda *_: True  # values of the fake device mean nothing
    for name, part in PARTS.items():
        _free_all()
        try:
            for line in part(is_fake):
                print(line, flush=True)
        except Exception as error:
            failed.append(name)
            print(f"{name} FAILED: {type(error).__name__}: {error}", flush=True)
            error.__traceback__ = None
    print(f"failed: {', '.join(failed)}" if failed else "each way on was taken, with the same results")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
