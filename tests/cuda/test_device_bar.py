"""The bar of `%gpumem` against what the device, the driver and the allocator say themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import Notebook, counters, holders, parts, report
from tests.fake_cuda.launch import environment
from tests.kernels import Kernel

MIB = 1024**2
CONTEXT = 300 * MIB


def _assert_re_adds(kernel: Kernel, device: dict) -> dict[str, int]:  # type: ignore[type-arg]
    """Assert what must hold of every report; return the parts."""
    index = int(device["device"].partition(":")[2])
    found = parts(device)
    allocated, reserved = counters(kernel, index)
    assert sum(found.values()) == device["total"]
    assert found["allocated"] == device["allocated"] == allocated == sum(holders(device).values())
    inside = ("allocated", "releasable", "stranded", "graph pools", "pending")
    assert sum(found.get(name, 0) for name in inside) == reserved
    for name, space in (
        ("releasable", "releasable"),
        ("stranded", "stranded"),
        ("graph pools", "kept"),
        ("pending", "pending"),
    ):
        assert sum(pool["space"][space] for pool in device["pools"]) == found.get(name, 0)
    assert sum(pool["space"]["reserved"] for pool in device["pools"]) == reserved
    return found


def test_parts_are_what_device_driver_and_allocator_say(notebook: Notebook, tmp_path: Path) -> None:
    settings = {"bytes": 4096 * MIB, "context": CONTEXT, "state": tmp_path / "state"}
    kernel, other = notebook(**settings), notebook(**settings)
    kernel.run("net, opt = train(); a = mib(30); b = mib(30); del a").ok()
    other.run("theirs = mib(700)").ok()

    (device,) = report(kernel)["devices"]

    found = _assert_re_adds(kernel, device)
    free, total = kernel.value("torch.cuda.mem_get_info()")
    assert (found["free"], device["total"]) == (free, total)
    assert found["context"] == CONTEXT
    assert found["others"] == 700 * MIB + CONTEXT
    assert found["releasable"] >= 30 * MIB
    assert {"net", "opt", "b"} <= set(holders(device)) | {"net + opt"}
    assert holders(device)["b"] == 30 * MIB
    nvml = "import pynvml; pynvml.nvmlInit(); _h = pynvml.nvmlDeviceGetHandleByIndex(0)"
    kernel.run_silently(nvml)
    used = dict(kernel.value("[(p.pid, p.usedGpuMemory) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(_h)]"))
    assert used == {kernel.pid: device["total"] - found["free"] - found["others"], other.pid: found["others"]}
    reserved = counters(kernel)[1]
    kernel.run("torch.cuda.empty_cache()").ok()
    assert reserved - counters(kernel)[1] == found["releasable"]


def test_a_kernel_that_has_not_used_cuda_gets_no_context(notebook: Notebook, tmp_path: Path) -> None:
    state = tmp_path / "state"
    kernel, watcher = notebook(state=state), notebook(state=state)
    watcher.run("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0); x = mib(1)").ok()

    text = kernel.run("%gpumem").ok().text
    (device,) = report(kernel)["devices"]
    found = parts(device)
    assert device["name"] == watcher.value("pynvml.nvmlDeviceGetName(h)")
    assert found["others"] == watcher.value("pynvml.nvmlDeviceGetComputeRunningProcesses(h)[0].usedGpuMemory") > MIB
    assert sum(found.values()) == device["total"]
    kernel.run("%reset_gpu").ok()
    kernel.run("cpu = torch.ones(5); %gpumem why cpu")
    kernel.run("%reset_gpu cpu")

    assert "CUDA is not initialised in this kernel yet" in text
    assert not kernel.value("torch.cuda.is_initialized()")
    assert watcher.value("[p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]") == [watcher.pid]


def test_looking_leaves_cuda_usable_in_processes_forked_later(fake_cuda_library: Path) -> None:
    """As `notebook_launcher` starts its ranks: CUDA's own count of its devices would already be too much."""
    code = """
import os, torch, nbguard
assert nbguard.report().tracked == "cuda"
pid = os.fork()
if not pid:
    os._exit(torch.cuda._is_in_bad_fork())
assert os.waitpid(pid, 0)[1] == 0, "CUDA cannot be used after a fork"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(folder=fake_cuda_library), check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


def test_initialised_is_not_opened(notebook: Notebook, tmp_path: Path) -> None:
    """`torch.cuda.init()` opens no device; a report in between must not either."""
    state = tmp_path / "state"
    kernel = notebook(state=state, devices=2)
    kernel.run("torch.cuda.init(); import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)").ok()
    opened = "[len(pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in (0, 1)]"
    before = kernel.value(opened)

    kernel.run("%gpumem").ok()

    assert kernel.value(opened) == before
    kernel.run("x = mib(1, 'cuda:1')").ok()
    before = kernel.value(opened)
    devices = {device["device"]: parts(device) for device in report(kernel)["devices"]}
    assert kernel.value(opened) == before
    assert devices["cuda:1"]["allocated"] == MIB


@pytest.mark.parametrize("nvml", ["absent", "no-pids", "no-bytes"])
def test_a_driver_that_says_less_is_not_guessed_at(notebook: Notebook, tmp_path: Path, nvml: str) -> None:
    state = tmp_path / "state"
    kernel, other = notebook(nvml=nvml, state=state, context=CONTEXT), notebook(state=state, context=CONTEXT)
    kernel.run("x = mib(30)").ok()
    other.run("theirs = mib(50)").ok()

    answer = report(kernel)

    found = _assert_re_adds(kernel, answer["devices"][0])
    assert found["others and contexts"] == 50 * MIB + 2 * CONTEXT
    assert "context" not in found
    if nvml == "absent":
        assert "driver does not answer" in answer["unavailable"][0]["reason"]


def test_pids_of_another_namespace_are_not_taken_for_others(notebook: Notebook, tmp_path: Path) -> None:
    """In a container NVML lists the host's pids: a single process is this kernel, of two none can be told to be."""
    state = tmp_path / "state"
    kernel = notebook(nvml="host-pids", state=state, context=CONTEXT)
    kernel.run("x = mib(30)").ok()

    alone = _assert_re_adds(kernel, report(kernel)["devices"][0])
    other = notebook(state=state, context=CONTEXT)
    other.run("theirs = mib(50)").ok()
    shared = _assert_re_adds(kernel, report(kernel)["devices"][0])

    assert (alone["context"], alone["others"]) == (CONTEXT, 0)
    assert shared["others and contexts"] == 50 * MIB + 2 * CONTEXT


def test_a_mig_slice_is_not_the_whole_gpu(notebook: Notebook) -> None:
    kernel = notebook(mig=1, bytes=2048 * MIB, context=CONTEXT)
    kernel.run("x = mib(30)").ok()

    (device,) = report(kernel)["devices"]

    found = _assert_re_adds(kernel, device)
    assert device["total"] == 2048 * MIB
    assert (found["context"], found["others"]) == (CONTEXT, 0)


def test_two_devices(notebook: Notebook, tmp_path: Path) -> None:
    kernel = notebook(devices=2, bytes=[2048 * MIB, 1024 * MIB], context=CONTEXT, state=tmp_path / "state")
    kernel.run("on0 = mib(30); on1 = mib(50, 'cuda:1'); both = [mib(12), mib(14, 'cuda:1')]").ok()

    first, second = report(kernel)["devices"]

    for device in (first, second):
        assert _assert_re_adds(kernel, device)["context"] == CONTEXT
    assert (first["total"], second["total"]) == (2048 * MIB, 1024 * MIB)
    assert holders(first) == {"on0": 30 * MIB, "both": 12 * MIB}
    assert holders(second) == {"on1": 50 * MIB, "both": 14 * MIB}
    (only,) = report(kernel, "--device 1")["devices"]
    assert holders(only) == holders(second)


def test_visible_devices_are_matched_by_uuid(notebook: Notebook, tmp_path: Path) -> None:
    """CUDA's device 0 is NVML's device 1 here: the others on it are the others on 1."""
    state, capacity = tmp_path / "state", [2048 * MIB, 1024 * MIB]
    settings = {"devices": 2, "bytes": capacity, "context": CONTEXT, "state": state}
    kernel, other = notebook(**settings, CUDA_VISIBLE_DEVICES="1"), notebook(**settings)
    other.run("a = mib(100); b = mib(50, 'cuda:1')").ok()
    kernel.run("x = mib(30)").ok()

    (device,) = report(kernel)["devices"]

    assert device["total"] == 1024 * MIB
    assert _assert_re_adds(kernel, device)["others"] == 50 * MIB + CONTEXT


def test_a_device_not_opened_is_the_drivers_to_tell(notebook: Notebook, tmp_path: Path) -> None:
    settings = {"devices": 2, "bytes": 1024 * MIB, "context": CONTEXT, "state": tmp_path / "state"}
    kernel, other = notebook(**settings), notebook(**settings)
    kernel.run("x = mib(30)").ok()
    other.run("b = mib(50, 'cuda:1')").ok()

    _, second = report(kernel)["devices"]

    assert parts(second)["others"] == 50 * MIB + CONTEXT
    assert sum(parts(second).values()) == second["total"]


def test_memory_that_waits_for_another_stream_is_pending(notebook: Notebook) -> None:
    kernel = notebook(events="manual")
    kernel.run("side = torch.cuda.Stream(); x = mib(30); x.record_stream(side); del x").ok()

    pending = _assert_re_adds(kernel, report(kernel)["devices"][0])
    kernel.run("fake.fake_cuda_complete_events(); y = mib(1)").ok()
    after = _assert_re_adds(kernel, report(kernel)["devices"][0])

    assert (pending["pending"], pending["allocated"]) == (30 * MIB, 0)
    assert "pending" not in after


def test_looking_neither_waits_nor_resets_nor_empties(notebook: Notebook) -> None:
    """With late events any synchronisation would be seen: it completes them."""
    kernel = notebook(events="manual")
    kernel.run("a = mib(60); del a; x = mib(30); event = torch.cuda.Event(); event.record()").ok()
    state = "torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), event.query()"
    before = kernel.value(state)
    launches = kernel.value("fake.fake_cuda_launches()")

    kernel.run("%gpumem").ok()
    kernel.run("%gpumem why x").ok()
    kernel.run("%reset_gpu --dry-run").ok()

    assert kernel.value(state) == before == (60 * MIB, before[1], False)
    assert kernel.value("fake.fake_cuda_launches()") == launches


def test_what_python_does_not_hold_is_named_by_the_line_that_allocated_it(notebook: Notebook) -> None:
    """Saved for backward by C++ alone: with history recorded the report says where it was made."""
    kernel = notebook()
    kernel.run("x = mib(1); torch.cuda.memory._record_memory_history(stacks='python')").ok()
    kernel.run("def hide(n):\n    return torch._C._cuda_cudaCachingAllocator_raw_alloc(n * 2**20, 0)\nkept = hide(6)").ok()

    device = report(kernel)["devices"][0]

    assert holders(device)["allocated at In[4], line 2 in hide()"] == 6 * 2**20
    assert sum(holders(device).values()) == counters(kernel)[0]


def test_a_report_while_another_thread_allocates_says_so_and_re_adds(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(
        "import threading\nstop = threading.Event()\n"
        "def churn():\n    while not stop.is_set(): kept = [mib(1) for _ in range(5)]\n"
        "junk = [[str(n)] for n in range(300_000)]; worker = threading.Thread(target=churn); worker.start()"
    ).ok()

    found = report(kernel)
    kernel.run("stop.set(); worker.join()").ok()

    device = found["devices"][0]
    assert [finding["kind"] for finding in found["findings"] if finding["kind"] in ("changed", "outside")] == ["changed"]
    assert sum(holders(device).values()) == device["allocated"]
