"""The fake device is good enough to stand on: what PyTorch's CUDA build must find there, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.kernels import Kernel

Run = Callable[..., str]

MIB = 1024**2


def test_device_and_copies(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
assert torch.cuda.mem_get_info() == (6 << 30, 8 << 30)
assert torch.arange(5.).cuda().cpu().tolist() == [0, 1, 2, 3, 4]
assert torch.cuda.get_device_capability() == (9, 0)
""",
        bytes=8 << 30,
        context=2 << 30,
        arch="9.0",
    )


def test_allocator_counts_segments_and_traces(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
cuda = torch.cuda
cuda.memory._record_memory_history(stacks="python")
def make(): return torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
free, _ = cuda.mem_get_info()
x = make()
assert cuda.memory_allocated() == cuda.memory_reserved() == 30 << 20
assert cuda.mem_get_info()[0] == free - (30 << 20)
snapshot = cuda.memory._snapshot()
assert sorted(event["action"] for event in snapshot["device_traces"][0][:2]) == ["alloc", "segment_alloc"]
assert snapshot["segments"][0]["blocks"][0]["frames"][0]["name"] == "make"
del x
assert cuda.memory_reserved() == 30 << 20
cuda.empty_cache()
assert cuda.memory_reserved() == 0 and cuda.mem_get_info()[0] == free
"""
    )


def test_out_of_memory_is_torchs_own(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
hits = []
torch._C._cuda_attach_out_of_memory_observer(lambda *args: hits.append(args))
keep = torch.empty(7 << 30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1024.00 MiB is free" in str(error)
else:
    raise SystemExit("no error")
assert len(hits) == 1 and torch.cuda.memory_stats()["num_ooms"] == 1
""",
        context=0,
    )


def test_expandable_segments_map_and_unmap(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
cuda = torch.cuda
xs = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
assert [(s["total_size"], s["is_expandable"]) for s in cuda.memory_snapshot()] == [(80 << 20, True)]
del xs[1:3]
cuda.empty_cache()
assert cuda.memory_reserved() == 40 << 20
assert float(torch.arange(1000.).cuda().cpu().sum()) == 499500
""",
        conf="expandable_segments:True",
    )


def test_networks_train(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
from torch import nn
mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
cnn = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3600, 10))
for model, x in ((mlp, torch.randn(8, 64)), (cnn, torch.randn(8, 3, 32, 32))):
    model.cuda()
    opt = torch.optim.Adam(model.parameters())
    nn.functional.cross_entropy(model(x.cuda()), torch.zeros(8, dtype=torch.long).cuda()).backward()
    assert all(p.grad.is_cuda for p in model.parameters())
    opt.step()
    assert all(state["exp_avg"].is_cuda for state in opt.state.values())
"""
    )


def test_fastai_fits(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
from fastai.basics import *
from fastai.callback.fp16 import *
rows = [(torch.randn(64), torch.tensor(i % 10)) for i in range(64)]
for half in (False, True):
    dls = DataLoaders.from_dsets(rows, rows, bs=16, device=torch.device("cuda"))
    learn = Learner(dls, nn.Linear(64, 10), loss_func=CrossEntropyLossFlat())
    if half: learn.to_fp16()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert len(learn.recorder.values) == 1 and next(learn.model.parameters()).is_cuda
"""
    )


def test_pinned_memory_and_loaders(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
from torch.utils.data import DataLoader, TensorDataset
assert torch.ones(9).pin_memory().is_pinned() and not torch.ones(9).is_pinned()
for workers in (0, 2):
    loader = DataLoader(TensorDataset(torch.arange(40.).reshape(20, 2)), batch_size=8, pin_memory=True, num_workers=workers)
    batches = [batch for batch, in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert batches[2].cuda(non_blocking=True).cpu()[0].tolist() == [32, 33]
"""
    )


def test_nvml_lists_processes_that_share_the_device(fake_cuda_run: Run, tmp_path: Path) -> None:
    fake_cuda_run(
        """
import os, subprocess, sys, torch, pynvml
HOLD = "import torch; x = torch.empty(100 << 20, dtype=torch.uint8, device='cuda'); print('ready', flush=True); input()"
x = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
other = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert other.stdout.readline() == "ready\\n"
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-" + str(torch.cuda.get_device_properties(0).uuid))
assert pynvml.nvmlDeviceGetName(handle) == "Fake CUDA GPU"
seen = lambda: {p.pid: p.usedGpuMemory >> 20 for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
assert seen() == {os.getpid(): 60, other.pid: 110}, seen()
assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == 170 << 20
assert torch.cuda.mem_get_info()[0] == (1 << 30) - (170 << 20)
other.kill(); other.wait()
assert seen() == {os.getpid(): 60}
""",
        bytes=1 << 30,
        context=10 << 20,
        state=f"{tmp_path}/state",
    )


def test_looking_opens_no_context(fake_cuda_run: Run, tmp_path: Path) -> None:
    fake_cuda_run(
        """
import torch, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
processes = lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
assert torch.cuda.device_count() == 1 and processes() == 0
torch.cuda.synchronize()
assert processes() == 1
""",
        state=f"{tmp_path}/state",
    )


def test_two_devices_have_their_own_capacity(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch, pynvml
cuda = torch.cuda
assert cuda.device_count() == 2
x, y = (torch.empty(100 << 20, dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 1))
assert [cuda.mem_get_info(i) for i in (0, 1)] == [(924 << 20, 1024 << 20), (412 << 20, 512 << 20)]
assert [cuda.memory_allocated(i) >> 20 for i in (0, 1)] == [100, 100]
try: torch.empty(600 << 20, dtype=torch.uint8, device="cuda:1")
except torch.OutOfMemoryError as error: assert "GPU 1 has a total capacity of 512.00 MiB" in str(error)
else: raise SystemExit("no error")
torch.empty(600 << 20, dtype=torch.uint8, device="cuda:0")
assert torch.arange(4.).to("cuda:0").to("cuda:1").cpu().tolist() == [0, 1, 2, 3]
pynvml.nvmlInit()
for i in (0, 1):
    handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-" + str(cuda.get_device_properties(i).uuid))
    assert pynvml.nvmlDeviceGetIndex(handle) == i
""",
        devices=2,
        bytes=[1 << 30, 512 << 20],
        context=0,
    )


def test_visible_devices_are_counted_anew(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch, pynvml
assert torch.cuda.device_count() == 1
x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda:0")
assert torch.cuda.mem_get_info()[1] == 512 << 20
pynvml.nvmlInit()
used = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(i)).used >> 20 for i in (0, 1)]
assert used == [0, 100], used
""",
        devices=2,
        bytes=[1 << 30, 512 << 20],
        context=0,
        CUDA_VISIBLE_DEVICES="1",
    )


def test_expandable_segments_on_the_second_device(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda:1")
assert torch.cuda.mem_get_info(1)[0] == 412 << 20 and torch.cuda.mem_get_info(0)[0] == 1 << 30
assert [(s["device"], s["is_expandable"]) for s in torch.cuda.memory_snapshot()] == [(1, True)]
""",
        devices=2,
        bytes=[1 << 30, 512 << 20],
        context=0,
        conf="expandable_segments:True",
    )


def test_events_can_be_late(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import ctypes, torch
side = torch.cuda.Stream()
x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
x.record_stream(side)
del x
blocks = lambda: [block["state"] for s in torch.cuda.memory_snapshot() for block in s["blocks"]]
assert blocks() == ["active_pending_free"]
torch.empty(1, device="cuda")
assert "active_pending_free" in blocks()
ctypes.CDLL("libcuda.so.1").fake_cuda_complete_events()
torch.empty(1, device="cuda")
assert "active_pending_free" not in blocks()
event = torch.cuda.Event(); event.record()
assert not event.query()
event.synchronize()
assert event.query()
""",
        events="manual",
    )


def test_graphs_have_pools_of_their_own(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch
graph = torch.cuda.CUDAGraph()
static = torch.zeros(1 << 20, device="cuda")
with torch.cuda.graph(graph):
    out = static * 2
pools = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()}
assert graph.pool() in pools and (0, 0) in pools
"""
    )


def test_sticky_errors(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import ctypes, torch
x = torch.ones(3, device="cuda")
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_set_error(710)
try: torch.cuda.synchronize()
except RuntimeError as error: assert "device-side assert triggered" in str(error)
else: raise SystemExit("no error")
fake.fake_cuda_set_error(0)
"""
    )


def test_nvml_as_containers_see_it(fake_cuda_run: Run) -> None:
    code = """
import os, torch, pynvml
x = torch.ones(3, device="cuda")
try:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    print([(p.pid - os.getpid(), p.usedGpuMemory) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)])
except pynvml.NVMLError_LibraryNotFound:
    print("absent")
"""
    seen = {mode: fake_cuda_run(code, nvml=mode, context=0).strip() for mode in ("absent", "no-pids", "host-pids", "no-bytes")}
    assert seen == {
        "absent": "absent",
        "no-pids": "[]",
        "host-pids": f"[(1000000, {2 * MIB})]",
        "no-bytes": "[(0, None)]",
    }


def test_a_mig_slice(fake_cuda_run: Run) -> None:
    fake_cuda_run(
        """
import torch, pynvml
x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
pynvml.nvmlInit()
whole = pynvml.nvmlDeviceGetHandleByIndex(0)
uuid = str(torch.cuda.get_device_properties(0).uuid)
try: pynvml.nvmlDeviceGetHandleByUUID("GPU-" + uuid)
except pynvml.NVMLError_NotFound: pass
else: raise SystemExit("the GPU answers to the slice's uuid")
part = pynvml.nvmlDeviceGetHandleByUUID("MIG-" + uuid)
total = lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).total
assert total(part) == torch.cuda.mem_get_info()[1] and total(whole) == 2 * total(part)
assert pynvml.nvmlDeviceIsMigDeviceHandle(part) and not pynvml.nvmlDeviceIsMigDeviceHandle(whole)
""",
        mig=1,
    )


def test_a_kernel_on_the_device(fake_cuda_kernel: Callable[..., Kernel]) -> None:
    kernel = fake_cuda_kernel(fastai=False, bytes=2 << 30, conf="expandable_segments:True")
    kernel.run("import torch").ok()
    assert not kernel.value("torch.cuda.is_initialized()")
    kernel.run("x = torch.ones(9, device='cuda')").ok()
    assert kernel.value("torch.cuda.mem_get_info()[1]") == 2 << 30
    assert kernel.value("torch.cuda.memory_snapshot()[0]['is_expandable']")
