"""States of the allocator to record that a fit does not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gpu.fits import Kept

MIB = 1024**2
LONG_SLEEP = 3_000_000_000
"""Clock cycles that take more than a second on any GPU of today."""


def out_of_memory() -> Kept:
    """Double the batch until the allocator says no. The cap makes that quick, and harmless on a large device."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
    batch = 1024
    try:
        while True:
            model(torch.zeros(batch, 1024, device="cuda")).sum().backward()
            model.zero_grad()
            batch *= 2
    except torch.OutOfMemoryError:
        return model, f"a three-layer MLP whose batch doubles until out of memory, at {batch}"


def fragments() -> Kept:
    """Leave every third of many tensors alive: small and large ones, in several streams."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    tensors: list[torch.Tensor] = []
    for number in range(180):
        with torch.cuda.stream(streams[number % 2]):
            tensors.append(torch.zeros((number % 9 + 1) ** 4 * 512, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return tensors[::3], "180 tensors of 512 B to 3.2 MiB in two streams, every third kept"


def graph() -> Kept:
    """Capture two CUDA graphs into one private pool and replay them."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    still = torch.zeros(256, 512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model(still).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    forward, both = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        out = model(still)
    with torch.cuda.graph(both, pool=forward.pool()):
        loss = model(still).sum()
        loss.backward()
    for _ in range(3):
        forward.replay()
        both.replay()
    torch.cuda.synchronize()
    return (model, still, forward, both, out, loss), "two CUDA graphs of an MLP in one private pool, replayed"


def record_stream() -> Kept:
    """Free tensors that a side stream still uses: they wait in active_pending_free while the snapshot is taken."""
    side = torch.cuda.Stream()
    kept = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    sizes = (512, 3 * MIB, 24 * MIB)
    del [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes][:]  # from here on the cache serves them
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
    for size in sizes:
        lent = torch.empty(size, dtype=torch.uint8, device="cuda")
        lent.record_stream(side)
        del lent
    return (kept, side), "three tensors freed while a side stream they were lent to (record_stream) still runs"


def pools() -> Kept:
    """Allocate in two memory pools of one's own, with live and freed tensors in each."""
    own, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    kept = [own, other, torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")]
    for pool in (own, other):
        with torch.cuda.use_mem_pool(pool):
            tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (700, 2 * MIB, 12 * MIB, 30 * MIB)]
            kept += tensors[::2]
            del tensors
    return kept, "two MemPools, each with two tensors kept and two freed"


def pool_left() -> Kept:
    """Let a memory pool go while a tensor of it lives: what is free in it may be given back from then on."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (700, 12 * MIB, 30 * MIB)]
    del pool
    return tensors[:2], "a MemPool let go with two tensors alive, a third freed afterwards"


def pinned() -> Kept:
    """Copy through pinned host memory, of which some is freed."""
    loader = torch.utils.data.DataLoader(torch.zeros(64, 256, 256), batch_size=16, pin_memory=True)
    batches = [batch.to("cuda", non_blocking=True) for batch in loader]
    kept = [torch.zeros(3 * MIB, dtype=torch.uint8, pin_memory=True), batches[0]]
    torch.cuda.synchronize()
    return kept, "a DataLoader with pin_memory, one batch and one pinned tensor kept"


def workspaces() -> Kept:
    """Multiply matrices in two streams and two precisions, so that cuBLAS and cuBLASLt take their workspaces."""
    kept: list[Any] = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for dtype in (torch.float32, torch.float16):
                matrix = torch.zeros(256, 256, dtype=dtype, device="cuda")
                kept.append(torch.addmm(matrix[0], matrix, matrix))
    torch.cuda.synchronize()
    return kept, "addmm in two streams, fp32 and fp16; only the results are kept"
