"""Texts of out-of-memory errors as PyTorch, CUDA's libraries, NumPy and Python write them, and texts that only look alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.core.oom_facts import OomNote
from nbguard.memory.scan.oom.chain import OomText, as_torch_writes, belongs_to, read_text, size_of

KiB, MiB, GiB, TiB = 1024, 1024**2, 1024**3, 1024**4
CUDA = (
    "CUDA out of memory. Tried to allocate 700.00 MiB. GPU 1 has a total capacity of 1024.00 MiB of which 584.00 MiB is free. "
    "Including non-PyTorch memory, this process has 440.00 MiB memory in use. {}Of the allocated memory 312.00 MiB is "
    "allocated by PyTorch, and 28.00 MiB is reserved by PyTorch but unallocated. If reserved but …"
)
MPS = (
    "MPS backend out of memory (MPS allocated: 17.64 GB, other allocations: 428.00 MB, max allowed: 18.13 GB). "
    "Tried to allocate 256.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit …"
)
SIMULATED = (
    "Simulated CUDA out of memory (nbguard.simulate): tried to allocate 80.00 MiB; the simulated device of 100.00 MiB has "
    "20.00 MiB free. 80.00 MiB is allocated by tensors, and 0 B is reserved by PyTorch's allocator but unallocated. …"
)
XPU = "XPU out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.56 GiB. Of the allocated …"
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes."
)
WINDOWS = "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate 123 bytes."
WORKER = "DataLoader worker (pid 4711) is killed by signal: Killed. "
BUS = "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of …"
SHM = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"


def _read(text: str, *types: str, errno: int | None = None) -> OomText | None:
    return read_text(types or ("RuntimeError", "Exception"), text, errno)


@pytest.mark.parametrize(
    ("text", "kind", "device", "requested", "limit"),
    [
        (CUDA.format(""), "device", "cuda:1", 700 * MiB, None),
        (CUDA.format("512.00 MiB allowed; "), "device", "cuda:1", 700 * MiB, 512 * MiB),
        (CUDA.format("").replace("CUDA", "HIP"), "device", "cuda:1", 700 * MiB, None),
        (XPU, "device", "xpu:0", 20 * GiB, None),
        (MPS, "device", "mps:0", 256 * MiB, round(18.13 * GiB)),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "device", "", None, None),
        (
            "CUDA out of memory. Allocation was preemptively rejected because it … limit. Requested size: 2.00 MiB",
            "device",
            "",
            2 * MiB,
            None,
        ),
        (SIMULATED, "device", "simulated:0", 80 * MiB, None),
        ("Exception occured in `X` when calling event `fit`:\n\t" + SIMULATED, "device", "simulated:0", 80 * MiB, None),
        ("Exception occured in `X` when calling event `fit`:\n\t" + CUDA.format(""), "device", "cuda:1", 700 * MiB, None),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "library", "cuda", None, None),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "library", "cuda", None, None),
        ("CUDA error: out of memory\nCUDA kernel errors might be …", "library", "cuda", None, None),
        ("CUDA driver error: out of memory", "library", "cuda", None, None),
        (CPU, "host", "cpu", 123, None),
        (WINDOWS, "host", "cpu", 123, None),
        ("$ Torch: unable to mmap memory: you tried to mmap 5 bytes.", "host", "cpu", 5, None),
        ("unable to mmap 77 bytes from file </torch_1_2_0>: Cannot allocate memory (12)", "host", "cpu", 77, None),
        (
            "Caught RuntimeError in DataLoader worker process 0.\nOriginal …\nRuntimeError: " + CPU,
            "host",
            "cpu",
            123,
            None,
        ),
        (SHM, "shm", "cpu", None, None),
        (BUS, "shm", "cpu", None, None),
        ("unable to write to file </torch_1_2_0>: No space left on device (28)", "shm", "cpu", None, None),
        (WORKER, "worker", "cpu", None, None),
        ("DataLoader worker (pid(s) 1, 2) is killed by signal: Killed. ", "worker", "cpu", None, None),
    ],
)
def test_what_a_text_says(text: str, kind: str, device: str, requested: int | None, limit: int | None) -> None:
    found = _read(text)

    assert found is not None
    assert (found.kind, found.device, found.requested, found.limit) == (kind, device, requested, limit)


@pytest.mark.parametrize(("text", "slack"), [("700.00 MiB", 0), ("701.00 MiB", MiB // 200), ("2.50 GiB", GiB // 200)])
def test_whole_segments_are_exact(text: str, slack: int) -> None:
    found = _read(CUDA.format("").replace("700.00 MiB", text))

    assert found is not None
    assert found.slack == slack


@pytest.mark.parametrize(
    ("text", "types", "requested"),
    [
        ("", ("MemoryError",), None),
        (
            "Unable to allocate 7.28 TiB for an array with shape (1, 2) and data type int8",
            ("MemoryError",),
            round(7.28 * TiB),
        ),
        ("std::bad_alloc", ("RuntimeError",), None),
        ("[Errno 12] Cannot allocate memory", ("OSError",), None),
    ],
)
def test_errors_of_python_and_numpy(text: str, types: tuple[str, ...], requested: int | None) -> None:
    found = _read(text, *types, errno=12)

    assert found is not None
    assert (found.kind, found.requested) == ("host", requested)


@pytest.mark.parametrize(
    ("text", "types", "errno"),
    [
        ("CUDA error: device-side assert triggered", ("RuntimeError",), None),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling …", ("RuntimeError",), None),
        ("No such file", ("OSError",), 2),
        ("[Errno 12] in a text only", ("ValueError",), 12),
        ("DataLoader worker (pid 4711) is killed by signal: Segmentation fault. ", ("RuntimeError",), None),
        ("out of memory", ("ValueError",), None),
        ("", ("RuntimeError",), None),
    ],
)
def test_errors_of_another_kind(text: str, types: tuple[str, ...], errno: int | None) -> None:
    assert _read(text, *types, errno=errno) is None


@pytest.mark.parametrize(
    ("number", "unit", "nbytes", "slack"),
    [
        ("512", "bytes", 512, 0),
        ("2.50", "GiB", 5 * GiB // 2, GiB // 200),
        ("1", "MiB", MiB, MiB // 2),
        ("256.00", "MB", 256 * MiB, MiB // 200),
        ("1.5", "TiB", 3 * TiB // 2, TiB // 20),
    ],
)
def test_sizes_with_what_their_rounding_hides(number: str, unit: str, nbytes: int, slack: int) -> None:
    assert size_of(number, unit) == (nbytes, slack)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MiB, "1024.00 KiB"),
        (MiB + MiB // 2, "1.50 MiB"),
        (GiB, "1024.00 MiB"),
        (GiB + 1, "1.00 GiB"),
        (1024 * GiB, "1024.00 GiB"),
    ],
)
def test_sizes_as_torch_writes_them(nbytes: int, text: str) -> None:
    assert as_torch_writes(nbytes) == text


def test_the_state_that_a_text_tells() -> None:
    found = _read(CUDA.format("512.00 MiB allowed; "))
    assert found is not None

    note = found.note()

    assert note is not None
    assert (note.device, note.requested, note.total, note.limit) == ("cuda:1", 700 * MiB, GiB, 512 * MiB)
    assert (note.free, note.allocated, note.reserved) == (584 * MiB, 312 * MiB, 340 * MiB)
    assert (note.slack, note.peak_allocated, note.time) == (2 * (MiB // 200), None, None)
    for text in (XPU, MPS, CPU, CUDA.format("").replace("is free", "…")):
        other = _read(text)
        assert other is not None
        assert other.note() is None


NOTE = OomNote(
    device="cuda:1",
    requested=700 * MiB,
    total=1024 * MiB,
    free=584 * MiB,
    limit=None,
    allocated=312 * MiB,
    reserved=340 * MiB,
    peak_allocated=0,
    peak_reserved=0,
)


def test_a_note_belongs_to_the_error_with_its_figures() -> None:
    text = _read(CUDA.format(""))
    assert text is not None

    assert belongs_to(NOTE, text)
    for field, value in (("device", "cuda:0"), ("requested", MiB), ("free", MiB), ("allocated", MiB), ("reserved", 350 * MiB)):
        assert not belongs_to(replace(NOTE, **{field: value}), text), field
    assert not belongs_to(NOTE, replace(text, kind="host"))
    assert belongs_to(NOTE, replace(text, device=""))
