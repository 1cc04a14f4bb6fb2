"""Parsed texts of out-of-memory errors: PyTorch's, of its allocators and of CUDA's libraries, NumPy's and Python's."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from nbguard.memory.core.oom_facts import OomKind, OomNote
from nbguard.memory.core.simulated import DEVICE as SIMULATED_DEVICE

_SIZE = r"([\d.]+) (bytes|[KMGTPE]i?B)"
_POWERS = {"b": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_DEVICE = re.compile(r"\b(?P<simulated>Simulated )?(?P<name>CUDA|HIP|XPU|MPS backend) out of memory\b")
"""The device in PyTorch's own words; errors of `nbguard.simulate` say that theirs is simulated."""
_KIND_OF_DEVICE = {"CUDA": "cuda", "HIP": "cuda", "XPU": "xpu", "MPS backend": "mps"}
_ASKED = re.compile(rf"(?:[Tt]ried to allocate|Requested size:?) {_SIZE}")
_STATE = re.compile(
    rf"GPU \d+ has a total capacity of {_SIZE} of which {_SIZE} is free.*? {_SIZE} is allocated by PyTorch.*?"
    rf" {_SIZE} is reserved by PyTorch but unallocated",
    re.DOTALL,
)
_ALLOWED = re.compile(rf"{_SIZE} allowed;|max allowed: {_SIZE}")
_LIBRARY = re.compile(
    r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED\b|\bCUFFT_ALLOC_FAILED\b"
    r"|\bcudaErrorMemoryAllocation\b|\b(?:CUDA|HIP)(?: driver)? error: out of memory\b"
)
_BYTES = re.compile(r"you tried to (?:allocate|mmap) (\d+) bytes|unable to mmap (\d+) bytes from file .*Cannot allocate memory")
_ARRAY = re.compile(rf"Unable to allocate {_SIZE} for an array")
_HOST = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|\bstd::bad_alloc\b")
_SHM = re.compile(
    r"insufficient shared memory|shared memory ?\(shm\)|killed by signal: Bus error"
    r"|unable to (?:resize|write to) file </torch_.*No space left"
)
_WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Killed")
_ENOMEM = 12
_SEGMENTS = 2 * 1024**2
"""Unit in bytes of PyTorch's requests to the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomText:
    """Figures and names in the text of one out-of-memory error."""

    kind: OomKind  # whose memory it was
    device: str  # empty where the text names none
    requested: int | None  # bytes
    slack: int = 0  # bytes that the request may be larger: the text has rounded it
    limit: int | None = None  # bytes that the process may use of the device, where that is less than all of it
    figures: frozenset[str] = frozenset()  # all sizes as written, e.g. `2.00 GiB`
    state: tuple[tuple[int, int], ...] = ()  # (bytes, slack) of the device, free, allocated, reserved besides

    def note(self) -> OomNote | None:
        """Return the facts on the failure in the text, in its rounded figures."""
        if not self.state or self.requested is None:
            return None
        (total, _), (free, _), (allocated, slack), (besides, more) = self.state
        reserved = allocated + besides
        return OomNote(
            device=self.device,
            requested=self.requested,
            total=total,
            free=free,
            limit=self.limit,
            allocated=allocated,
            reserved=reserved,
            slack=slack + more,
        )


def read_text(types: Collection[str], text: str, errno: int | None = None) -> OomText | None:
    """Return the text of an out-of-memory error, read; None of an error of another kind.

    Args:
        types: the names of its class and of the classes above that.
        text: its message, also that of an error of a worker which the message quotes.
        errno: the number of an OSError.
    """
    name = _DEVICE.search(text)
    if name is not None or "OutOfMemoryError" in types:
        kind = "cuda" if name is None else _KIND_OF_DEVICE[name["name"]]
        return _of_device(text, kind, is_simulated=name is not None and name["simulated"] is not None)
    if _LIBRARY.search(text):
        return OomText(kind="library", device="cuda", requested=None)
    if _SHM.search(text):
        return OomText(kind="shm", device="cpu", requested=None)
    if _WORKER.search(text):
        return OomText(kind="worker", device="cpu", requested=None)
    number, array = _BYTES.search(text), _ARRAY.search(text)
    if number is not None:
        return OomText(kind="host", device="cpu", requested=int(number[1] or number[2]))
    if array is not None:
        requested, slack = size_of(array[1], array[2])
        return OomText(kind="host", device="cpu", requested=requested, slack=slack)
    if "MemoryError" in types or _HOST.search(text) or ("OSError" in types and errno == _ENOMEM):
        return OomText(kind="host", device="cpu", requested=None)
    return None


def _of_device(text: str, kind: str, *, is_simulated: bool) -> OomText:
    where, asked, allowed = re.search(r"\bGPU (\d+)", text), _ASKED.search(text), _ALLOWED.search(text)
    device = (
        SIMULATED_DEVICE if is_simulated else f"{kind}:{where[1]}" if where is not None else "mps:0" if kind == "mps" else ""
    )
    limit = None if allowed is None else size_of(*[part for part in allowed.groups() if part])[0]
    figures = frozenset(f"{number} {unit}" for number, unit in re.findall(_SIZE, text))
    requested, slack = (None, 0) if asked is None else size_of(asked[1], asked[2])
    if kind != "mps" and requested is not None and slack < _SEGMENTS // 2 and requested % _SEGMENTS == 0:
        slack = 0  # it asks the driver for whole segments: the rounding of the text hides no other size
    tells = _STATE.search(text)
    sizes = () if tells is None else tells.groups()
    state = tuple(size_of(number, unit) for number, unit in zip(sizes[::2], sizes[1::2], strict=True))
    return OomText(kind="device", device=device, requested=requested, slack=slack, limit=limit, figures=figures, state=state)


def size_of(number: str, unit: str) -> tuple[int, int]:
    """Return (bytes, how many more it may be) of a size as written: the writer rounded to the digits that are there.

    Units are powers of 1024 however they are spelled: PyTorch writes MB and MiB for the same.
    """
    scale: int = 1024 ** _POWERS[unit[0]]
    digits = len(number.partition(".")[2])
    return round(float(number) * scale), scale // (2 * 10**digits) if scale > 1 else 0


def as_torch_writes(nbytes: int) -> str:
    """Return a size as torch's allocators write it: `1024.00 MiB`, `512 bytes`."""
    for power, unit in ((1, "bytes"), (1024, "KiB"), (1024**2, "MiB"), (1024**3, "GiB")):
        if nbytes <= 1024 * power or unit == "GiB":
            return f"{nbytes} {unit}" if power == 1 else f"{nbytes / power:.2f} {unit}"
    raise AssertionError  # the last unit takes any size


def belongs_to(note: OomNote, text: OomText) -> bool:
    """Say whether a note is of the same failure as `text`: same device, and its figures are among the text's.

    Request, free memory, allocated and unallocated memory: an older failure of the same figures was the same state.
    """
    figures = (note.requested, note.free, note.allocated, note.reserved - note.allocated)
    if text.kind != "device" or (text.device and text.device != note.device):
        return False
    return all(as_torch_writes(nbytes) in text.figures for nbytes in figures)
