"""Fits on a device that lacks a share of their peak, with an airbag; run on the fake device by a test, or by hand in full.

`python -m tests.fake_cuda python -m tests.cuda.airbag_fits --all` prints a line for each case and a table at the end;
`--all 2/4` runs the second of four shares.
"""

import ctypes
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from nbguard.memory.room.airbag import Airbag, airbag_now
from nbguard.memory.room.device import HostReserve
from nbguard.memory.room.spill_watch import bring_back, relieve, switch, watch_now
from nbguard.memory.scan.devices.segments import listed_segments
from nbguard.memory.scan.scan import Notebook

MIB = 1024**2
_RUNTIME = ctypes.CDLL("libcuda.so.1")  # all of the fake's libraries are one
NAMES: dict[str, Any] = {}
"""The notebook's names."""
NOTEBOOK = Notebook(shell=None, namespace=NAMES)


class _Recurrent(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(256, 256) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for cell in self.cells:
            x = cell(x)
        return x


class _Residual(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)
        )

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _mlp(width: int, depth: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), act())))


def _convolutions(channels: int, depth: int, *, norm: bool) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels) if norm else nn.ReLU())]
    return nn.Sequential(*layers * depth, nn.Flatten())


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True), 3, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "wide": (lambda: _mlp(1024, 8), (512, 1024)),
    "deep": (lambda: _mlp(512, 24, nn.GELU), (2048, 512)),
    "encoder": (_encoder, (16, 128, 256)),
    "convolutions": (lambda: _convolutions(32, 6, norm=True), (16, 32, 64, 64)),
    "plain": (lambda: _convolutions(16, 8, norm=False), (32, 16, 64, 64)),
    "residual": (lambda: _Residual(768, 10), (1024, 768)),
    "recurrent": (_Recurrent, (4096, 256)),
    "linear": (lambda: nn.Linear(4096, 4096), (256, 4096)),
    "tanh": (lambda: _mlp(256, 40, nn.Tanh), (4096, 256)),
    "dropout": (lambda: nn.Sequential(_mlp(1024, 4), nn.Dropout(0.2), _mlp(1024, 4)), (1024, 1024)),
    "small": (lambda: _mlp(128, 60), (1024, 128)),
    "bottleneck": (lambda: nn.Sequential(nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 4096)), (2048, 2048)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True),
}


def spilled() -> int:
    """Return what PyTorch itself says lies in the airbag's pool, in bytes."""
    on = airbag_now()
    assert on is not None
    return sum(segment["active_size"] for segment in listed_segments(_pool(on)))


def _pool(on: Airbag) -> Any:
    assert isinstance(on.reserve, HostReserve)
    return on.reserve.pool.id


def fit(name: str, optimizer: str, *, half: bool, steps: int = 3) -> tuple[Any, ...]:
    """Fit a model; return what a notebook keeps of it."""
    make, shape = MODELS[name]
    with torch.device("cuda"):
        model = make()
    opt = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model(torch.zeros(shape, device="cuda")).float().square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model, opt


def free_all() -> None:
    """Free what the notebook keeps, and the cache."""
    NAMES.clear()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def only(nbytes: int) -> Iterator[Callable[[], None]]:
    """Leave so many bytes of the device free: something else takes the rest. What is yielded ends that before."""
    taken, free = ctypes.c_void_p(), torch.cuda.mem_get_info()[0]
    assert not _RUNTIME.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(free - nbytes))

    def end() -> None:
        if taken.value:
            _RUNTIME.cudaFree(taken)
        taken.value = None

    try:
        yield end
    finally:
        end()


def case(name: str, optimizer: str, *, half: bool, lacks: float) -> int:
    """Fit where the device lacks a share of the peak; check what the airbag promises; return the bytes that were outside."""
    free_all()
    torch.cuda.reset_peak_memory_stats()
    NAMES["kept"] = fit(name, optimizer, half=half)
    peak = torch.cuda.max_memory_reserved()
    free_all()
    switch(max(2 * peak, 512 * MIB), NOTEBOOK)
    on, watch = airbag_now(), watch_now()
    assert on is not None
    assert watch is not None
    with only(int((1 - lacks) * peak)) as end:
        watch.begin()
        NAMES["kept"] = fit(name, optimizer, half=half)
        most = watch.total()
        relieve(on, NOTEBOOK)
        left = on.spilled
        assert left == spilled()
        room = torch.cuda.mem_get_info()[0]
        smallest = min((block["size"] for block in _blocks(on)), default=room + 1)
        assert smallest > room or smallest + 20 * MIB > room, (smallest, room)
        assert not left or bring_back(on, NOTEBOOK)[0] == 0, "a second move finds nothing to do"
        end()
        bring_back(on, NOTEBOOK)
        assert spilled() == 0, "with room for all of it nothing stays"
    free_all()
    switch("off", NOTEBOOK)
    assert torch.cuda.memory_reserved() == 0
    return most


def _blocks(on: Any) -> list[dict[str, Any]]:
    segments = listed_segments(_pool(on))
    return [block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"]


def again(times: int) -> None:
    """Fit again and again on a device that lacks half of the peak: nothing grows."""
    free_all()
    NAMES["kept"] = fit("wide", "Adam", half=False)
    peak = torch.cuda.max_memory_reserved()
    free_all()
    switch(max(2 * peak, 512 * MIB), NOTEBOOK)
    on = airbag_now()
    assert on is not None
    with only(peak // 2):
        figures = set()
        for number in range(times):
            NAMES["kept"] = None
            NAMES["kept"] = fit("wide", "Adam", half=False)
            relieve(on, NOTEBOOK, with_stale=False)
            if number:
                figures.add((spilled(), torch.cuda.memory_allocated()))
        assert len(figures) <= 2, figures
    free_all()
    switch("off", NOTEBOOK)


LACKING = (0.1, 0.25, 0.4, 0.6)
"""Shares of the peak that the device lacks."""
Case: TypeAlias = tuple[str, str, bool, float]
"""(model, optimizer, whether it fits in bfloat16, share that the device lacks)"""


def some_cases() -> list[Case]:
    """Return the cases of a test."""
    some = zip(MODELS, itertools.cycle(OPTIMIZERS), itertools.cycle((False, True, True)), strict=False)
    cases = [(*each, lacks) for each, lacks in zip(some, itertools.cycle((0.1, 0.35, 0.6)), strict=False)][::3]
    # A workspace of cuBLAS takes the room that the smallest tensor in the airbag needs.
    return [*cases, ("linear", "AdamW fused", True, 0.6)]


def sweep(cases: list[Case]) -> list[tuple[Case, int | None]]:
    """Run cases one by one, and print each; return the bytes that were outside, None where the case failed."""
    found: list[tuple[Case, int | None]] = []
    for name, optimizer, half, lacks in cases:
        outside: int | None = None
        try:
            outside = case(name, optimizer, half=half, lacks=lacks)
            words = f"{outside / MIB:8.1f} MiB"
        except Exception as error:
            words = f"FAILED {type(error).__name__}: {error}"
            error.__traceback__ = None
            free_all()
            switch("off", NOTEBOOK)
        print(f"{name:13}{optimizer:15}{'bf16' if half else 'fp32':6}{lacks:5.0%}{words:>15}", flush=True)
        found.append(((name, optimizer, half, lacks), outside))
    return found


def print_table(found: list[tuple[Case, int | None]]) -> None:
    """Print by model and missing share the cases that went through, and the bytes that were outside."""
    print("\n" + " " * 13 + "".join(f"{f'{lacks:.0%} lacking':>24}" for lacks in LACKING))
    for name in MODELS:
        cells = []
        for lacks in LACKING:
            these = [outside for (model, _, _, share), outside in found if (model, share) == (name, lacks)]
            passed = [nbytes // MIB for nbytes in these if nbytes is not None]
            cells.append(f"{len(passed)} of {len(these)}: {min(passed, default=0)}–{max(passed, default=0)} MiB")
        print(f"{name:13}" + "".join(f"{cell:>24}" for cell in cells))


def main(arguments: list[str]) -> int:
    """Run the cases of a test, or with `--all` the sweep, or a share of it; return 1 if a case of the sweep failed."""
    torch.zeros(1, device="cuda")
    if "--all" not in arguments:
        outside = [case(name, optimizer, half=half, lacks=lacks) for name, optimizer, half, lacks in some_cases()]
        again(3)
        print(len(outside), sum(map(bool, outside)), sum(outside) // MIB)
        return 0
    cases = list(itertools.product(MODELS, OPTIMIZERS, (False, True), LACKING))
    share, shares = map(int, (next((text for text in arguments if "/" in text), "1/1")).split("/"))
    found = sweep(cases[len(cases) * (share - 1) // shares : len(cases) * share // shares])
    print_table(found)
    failed = sum(outside is None for _, outside in found)
    print(f"{len(found)} cases, {failed} failed, {sum(bool(outside) for _, outside in found)} spilled")
    again(50)
    print("50 fits in a row: no growth")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
