"""Out-of-memory errors, found in an exception and its parts, with their texts parsed and the notes made at the moment.

Read by the slots of Python's own classes: an exception may be of the user's making.
"""

from __future__ import annotations

import builtins
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.core.facts import DeviceFacts, Segment
from nbguard.memory.core.fragmentation import fragmentation, stranded_pages
from nbguard.memory.core.oom_facts import OomKind, OomNote
from nbguard.memory.core.requests import Room
from nbguard.memory.core.simulated import DEVICE as SIMULATED_DEVICE
from nbguard.memory.scan.heap.kinds import mro_of, name_of, namespace_of
from nbguard.texts import running_shell

# --- Parsed texts of out-of-memory errors: PyTorch's, of its allocators and of CUDA's libraries, NumPy's and Python's.


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


_FAR_ENOUGH = 100
"""Most exceptions of a chain that are examined."""
_LONG_ENOUGH = 20_000
"""Characters of a message that are read: a worker's quotes a whole traceback."""
_SLOTS = namespace_of(BaseException)
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)


def slot(error: BaseException, name: str) -> Any:
    """Return an attribute that every exception has (`args`, `__cause__`), past anything that a subclass put over it."""
    return _SLOTS[name].__get__(error)


def is_exception(value: object) -> bool:
    """Say whether a value is an exception, by its type alone: `isinstance` would ask a proxy's `__class__`."""
    return BaseException in mro_of(type(value))


def parts_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions in a group; none if it is no group."""
    parts: tuple[BaseException, ...] = ()
    if _GROUP is not None and _GROUP in mro_of(type(error)):
        parts = namespace_of(_GROUP)["exceptions"].__get__(error)
    return parts


def find_in_chain(error: BaseException) -> tuple[BaseException, OomText] | None:
    """Return the first out-of-memory error that `error` is or leads to, with its facts."""
    todo, seen = [error], set[int]()
    while todo and len(seen) < _FAR_ENOUGH:
        current = todo.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        text = read(current)
        if text is not None:
            return current, text
        todo += [next_one for next_one in (slot(current, "__cause__"), slot(current, "__context__")) if next_one is not None]
        todo += parts_of(current)
    return None


def read(error: BaseException) -> OomText | None:
    """Return the facts on memory in one exception, or None."""
    bases, args = mro_of(type(error)), slot(error, "args")
    words = [str.__str__(arg) for arg in args if str in mro_of(type(arg))]
    errno = namespace_of(OSError)["errno"].__get__(error) if OSError in bases else None
    text = read_text({name_of(base) for base in bases}, " ".join(words)[:_LONG_ENOUGH], errno)
    if text is not None and text.requested is None and MemoryError in bases:
        return replace(text, requested=_array_bytes(args))
    return text


def _array_bytes(args: tuple[Any, ...]) -> int | None:
    """Return the size of the array that NumPy could not make: its error has no text, but the shape and the dtype."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or len(args) != 2 or type(args[0]) is not tuple or numpy.dtype not in mro_of(type(args[1])):
        return None
    return math.prod(args[0]) * int(args[1].itemsize) if all(type(length) is int for length in args[0]) else None


# --- Notes that were made at the moment of running out of memory, by `cleanup.apply.oom_observer` and by a simulated device.


_KEPT = 8
_TOO_MANY = 50_000
"""Blocks of the allocator that are not read any more while an error is being raised: it would take a tenth of a second."""

NOTES: deque[OomNote] = deque(maxlen=_KEPT)
"""The latest notes, the last one at the end: numbers only."""


def note_of(text: OomText) -> OomNote | None:
    """Return the latest note of the failure that an error's text tells of."""
    return next((note for note in reversed(tuple(NOTES)) if belongs_to(note, text)), None)


def with_free_blocks(note: OomNote, blocks: int, read: Callable[[], Iterable[Segment]]) -> OomNote:
    """Return a note with the memory that was free between live blocks. It says so of too many `blocks` without reading them."""
    if blocks > _TOO_MANY:
        return replace(note, unread=f"{blocks:,} blocks: too many to read while the error was raised")
    segments = tuple(segment for segment in read() if not segment.is_private)
    return replace(
        note,
        stranded=fragmentation(segments).stranded,
        largest_free=Room(device=DeviceFacts(device="", name="", segments=segments)).largest().cached,
        pages=stranded_pages(segments),
    )


def ran_out(error: BaseException) -> bool:
    """Say whether an exception is, or was raised because of or after, running out of memory. Quick; never raises."""
    try:
        return find_in_chain(error) is not None
    except Exception:  # noqa: BLE001 - not an exception at all, or one that is not whole
        return False


def cell_now() -> int | None:
    """Return the number of the cell that runs, if a notebook's."""
    shell = running_shell()
    return None if shell is None else len(shell.history_manager.input_hist_parsed) - 1
