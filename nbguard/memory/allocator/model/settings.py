"""The caching allocator's settings, from and to strings such as `expandable_segments:True`, its constants and formulas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from nbguard.errors import SettingsError

# --- The constants and formulas of PyTorch's caching allocator, from rounding to the order of free blocks.
#
# They hold for torch 2.1 to 2.15; where versions differ, the version decides, never the file at hand. Sizes in bytes.


MIN_BLOCK = 512
"""Every block is a multiple of this many bytes (`kMinBlockSize`)."""

SMALL_MAX = 1024**2
"""A rounded request of at most this many bytes is served by the small pool (`kSmallSize`)."""

SMALL_SEGMENT = 2 * 1024**2
"""Bytes of a segment of the small pool, and of a page of its expandable segments (`kSmallBuffer`)."""

MIN_LARGE = 10 * 1024**2
"""A request from this size on gets a segment of its own size; smaller ones share a large segment (`kMinLargeAlloc`)."""

ROUND_LARGE = 2 * 1024**2
"""A segment of a request's own size is a multiple of this many bytes (`kRoundLarge`)."""

LARGE_SEGMENT = 20 * 1024**2
"""The default large segment size; also a page of an expandable segment of the large pool (`kLargeBuffer`)."""

DIVISION_ENTRIES = 16
"""Entries of the table of `roundup_power2_divisions`: one for each power of two from 1 MiB up."""

NO_DIVISIONS = (0,) * DIVISION_ENTRIES

PoolId = tuple[int, int]
"""(0, 0) for the default pool, (n, 0) for a pool of CUDA graphs, (0, n) for a MemPool (torch's `MempoolId_t`)."""

DEFAULT_POOL: PoolId = (0, 0)

TieBreak = Literal["address", "block", "segment"]
"""The order of free blocks of one stream and size: by address, by age of the block object, or by age of the segment."""

NEWEST = (2, 15)
"""The newest version whose rules were compared with the binaries."""


def parse_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as `2.13.0+cu130`. Raises ValueError if it is none."""
    match = re.match(r"\s*v?(\d{1,4})\.(\d{1,4})(?!\d)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a PyTorch version; write it as 2.13 or 2.13.0")
    return int(match[1]), int(match[2])


def tie_break(version: tuple[int, int]) -> TieBreak:
    """Return the order of free blocks of equal size in a version of torch."""
    if version < (2, 12):
        return "address"
    return "block" if version < (2, 13) else "segment"


def round_size(size: int, divisions: tuple[int, ...] = NO_DIVISIONS) -> int:
    """Return the size of the block that serves a request of `size` bytes, without a rest that is not split off (`round_size`).

    Args:
        size: bytes asked for, at least 1.
        divisions: by size class, the number of steps between one power of two and the next
            (`roundup_power2_divisions`); 0 and 1 mean multiples of 512 bytes.
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    count = divisions[min(max(size.bit_length() - 21, 0), DIVISION_ENTRIES - 1)]
    if count <= 1 or size <= MIN_BLOCK * count:
        return -(-size // MIN_BLOCK) * MIN_BLOCK
    power = 1 << (size.bit_length() - 1)
    if power == size:
        return size
    step = power >> (count.bit_length() - 1)
    return -(-size // step) * step if step else 2 * power


def segment_size(rounded: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return the bytes asked of the driver for a rounded request that no free block serves (`get_allocation_size`)."""
    if rounded <= SMALL_MAX:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return large_segment
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def range_size(total: int | None, page: int) -> int:
    """Return the bytes of address space of one expandable segment: 9/8 of the device, in whole pages.

    A device of unknown size counts as one of 256 GiB: it matters only where one pool and stream have several ranges.
    """
    total = 2**38 if total is None else total
    return -(-(total + total // 8) // page) * page


Value = str | tuple[tuple[str, str], ...]
"""The value of a key as written: one word, or the pairs of a list such as `[256:1,512:2]`."""

_LONGEST = 4096
"""Characters of a settings string; a longer one is refused."""

_PAIR = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)")
_MIB = 1024**2
_LARGEST_MB = 2**43
_OTHERS: dict[str, tuple[int, int]] = {
    "release_lock_on_cudamalloc": (2, 0),
    "pinned_use_cuda_host_register": (2, 0),
    "pinned_num_register_threads": (2, 0),
    "pinned_use_background_threads": (2, 0),
    "graph_capture_record_stream_reuse": (2, 9),
    "pinned_reserve_segment_size_mb": (2, 10),
    "pinned_free_catch_all": (2, 12),
    "pinned_max_round_threshold_mb": (2, 13),
    "pinned_max_cached_size_mb": (2, 13),
    "expandable_segments_reserve": (2, 15),
    "expandable_segments_reserve_by_class": (2, 15),
}
"""Keys that change nothing in the model, with the version since which PyTorch knows them: kept, and printed again."""

_MODELLED: dict[str, tuple[int, int]] = {
    "max_split_size_mb": (2, 0),
    "max_non_split_rounding_mb": (2, 6),
    "roundup_power2_divisions": (2, 0),
    "garbage_collection_threshold": (2, 0),
    "expandable_segments": (2, 0),
    "large_segment_size_mb": (2, 11),
    "per_process_memory_fraction": (2, 10),
    "throw_on_cudamalloc_oom": (2, 12),
    "backend": (2, 0),
}
"""Keys that the model obeys, with the version since which PyTorch knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The settings of the allocator, as in `PYTORCH_ALLOC_CONF`; None stands for PyTorch's own default."""

    max_split_size: int | None = None  # bytes: a block from this size on is never split (max_split_size_mb)
    max_non_split_rounding: int | None = None  # bytes: slack of a request for such a block (max_non_split_rounding_mb)
    divisions: tuple[int, ...] = NO_DIVISIONS  # 16 entries for sizes from 1 MiB up, doubling (roundup_power2_divisions)
    gc_threshold: float = 0.0  # share of the limit above which unused segments go; 0 if off (garbage_collection_threshold)
    expandable: bool = False  # expandable_segments
    large_segment: int = LARGE_SEGMENT  # bytes of a shared segment of the large pool (large_segment_size_mb)
    fraction: float | None = None  # share of the device that the process may take (per_process_memory_fraction)
    throw_on_oom: bool = False  # refuse at once, with nothing given back first (throw_on_cudamalloc_oom)
    others: tuple[tuple[str, str], ...] = ()  # (key, value) of settings that change nothing in the model, as written

    @classmethod
    def parse(cls, conf: str, version: tuple[int, int] | None = None) -> AllocatorSettings:
        """Return the settings that a string sets when PyTorch starts.

        Args:
            conf: the value of `PYTORCH_ALLOC_CONF` (or of its CUDA and HIP forms).
            version: (major, minor) of torch: keys that it does not know are refused, and its rule for `>` holds.
                None accepts every known key and takes the newest rules.

        Raises:
            SettingsError: the string is not well formed, names an unknown key, or gives a key a value it cannot have.
        """
        return cls().updated(conf, version)

    @classmethod
    def recorded(cls, conf: str, version: tuple[int, int] | None = None) -> AllocatorSettings:
        """Return the settings of a recorded string. Some PyTorch accepted it, so keys unknown here are kept in `others`."""
        pairs = _read_conf(conf)
        known = {key: value for key, value in pairs.items() if key in _MODELLED or key in _OTHERS}
        others = tuple((key, _value_text(value)) for key, value in pairs.items() if key not in known)
        settings = _apply(cls(), known, version)
        return replace(settings, others=settings.others + others)

    def updated(self, conf: str, version: tuple[int, int] | None = None) -> AllocatorSettings:
        """Return the settings after `torch.cuda.memory._set_allocator_settings(conf)`.

        A call puts max_split_size_mb, max_non_split_rounding_mb, roundup_power2_divisions and
        garbage_collection_threshold back to their defaults and leaves the rest as it was, unless named.
        """
        return _apply(self, _read_conf(conf), version)

    def conf(self) -> str:
        """Return the string that sets these settings in PyTorch; empty where all is at its default."""
        parts = [f"expandable_segments:{self.expandable}"] if self.expandable else []
        if self.large_segment != LARGE_SEGMENT:
            parts.append(f"large_segment_size_mb:{self.large_segment // _MIB}")
        if self.max_split_size is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size // _MIB}")
        if self.max_non_split_rounding is not None:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // _MIB}")
        if any(self.divisions):
            parts.append(f"roundup_power2_divisions:{_divisions_text(self.divisions)}")
        if self.gc_threshold:
            parts.append(f"garbage_collection_threshold:{self.gc_threshold}")
        if self.fraction is not None:
            parts.append(f"per_process_memory_fraction:{self.fraction}")
        if self.throw_on_oom:
            parts.append("throw_on_cudamalloc_oom:True")
        return ",".join(parts + [f"{key}:{value}" for key, value in self.others])


def _read_conf(conf: str) -> dict[str, Value]:
    """Return keys and values as written; of a key that occurs twice the last value counts.

    Raises:
        SettingsError: the string is not well formed.
    """
    text = "".join(conf.split())
    if len(text) > _LONGEST:
        raise SettingsError(f"allocator settings: {len(text)} characters are too many for settings.")
    return {key: _pairs(key, value[1:-1]) if value.startswith("[") else value for key, value in _split(text)}


def _split(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _PAIR.match(text, position)
        end = match.end() if match else position
        if match is None or (end < len(text) and text[end] != ","):
            rest = text[position : position + 40]
            raise SettingsError(f"{rest}: settings are written key:value, with a comma between them.")
        yield match[1], match[2]
        position = end + 1


def _pairs(key: str, text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in text.split(","):
        name, colon, value = part.partition(":")
        if not (name and colon and value) or ":" in value:
            raise SettingsError(f"{key}: a list is written [256:1,512:2,>:4], and {part!r} is not of that form.")
        pairs.append((name, value))
    return tuple(pairs)


def _value_text(value: Value) -> str:
    """Return a value as it is written."""
    return value if isinstance(value, str) else "[" + ",".join(f"{name}:{text}" for name, text in value) + "]"


def _divisions_text(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return "[" + ",".join(f"{1 << index}:{value}" for index, value in enumerate(divisions)) + "]"


def _apply(settings: AllocatorSettings, pairs: dict[str, Value], version: tuple[int, int] | None) -> AllocatorSettings:
    large = settings.large_segment
    if "large_segment_size_mb" in pairs:
        large = _megabytes(pairs, "large_segment_size_mb", 11)
    changed = replace(
        settings,
        max_split_size=None,
        max_non_split_rounding=None,
        divisions=NO_DIVISIONS,
        gc_threshold=0.0,
        large_segment=large,
    )
    others = dict(settings.others)
    for key, value in pairs.items():
        since = _MODELLED.get(key) or _OTHERS.get(key)
        if since is None:
            raise SettingsError(f"{key}: PyTorch has no such allocator setting; known are {', '.join(sorted(_MODELLED))}.")
        if version is not None and version < since:
            raise SettingsError(f"{key}: known to PyTorch since {since[0]}.{since[1]}, and this is {version[0]}.{version[1]}.")
        match key:
            case "max_split_size_mb":
                changed = replace(changed, max_split_size=_megabytes(pairs, key, large // _MIB))
            case "max_non_split_rounding_mb":
                changed = replace(changed, max_non_split_rounding=_megabytes(pairs, key, large // _MIB))
            case "roundup_power2_divisions":
                changed = replace(changed, divisions=_divisions(value, version or NEWEST))
            case "garbage_collection_threshold":
                changed = replace(changed, gc_threshold=_between(key, value, closed=False))
            case "per_process_memory_fraction":
                changed = replace(changed, fraction=_between(key, value, closed=True))
            case "expandable_segments":
                changed = replace(changed, expandable=_boolean(key, value))
            case "throw_on_cudamalloc_oom":
                changed = replace(changed, throw_on_oom=_boolean(key, value))
            case "backend" if value != "native":
                raise SettingsError(
                    "backend: only the native allocator is modelled; cudaMallocAsync does not cache blocks itself."
                )
            case _ if key in _OTHERS:
                others[key] = _value_text(value)
    return replace(changed, others=tuple(others.items()))


def _text(key: str, value: Value) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{key}: takes one value, not a list.")
    return value


def _megabytes(pairs: dict[str, Value], key: str, least: int) -> int:
    text = _text(key, pairs[key])
    if not (text.isascii() and text.isdigit() and len(text) < 16 and least <= int(text) <= _LARGEST_MB):
        raise SettingsError(f"{key}: takes a whole number of MiB from {least} on, not {text!r}.")
    return int(text) * _MIB


def _between(key: str, value: Value, *, closed: bool) -> float:
    try:
        number = float(_text(key, value))
    except ValueError:
        number = -1.0
    if not (0 < number < 1 or (closed and number == 1)):
        raise SettingsError(f"{key}: takes a number between 0 and 1, not {value!r}.")
    return number


def _boolean(key: str, value: Value) -> bool:
    if value not in ("True", "False"):
        raise SettingsError(f"{key}: takes True or False, spelt so, not {value!r}.")
    return value == "True"


def _divisions(value: Value, version: tuple[int, int]) -> tuple[int, ...]:
    """Return the table that a value of `roundup_power2_divisions` sets; a scalar holds for all sizes."""
    key = "roundup_power2_divisions"
    if isinstance(value, str):
        return (_power_of_two(key, value, or_zero=False),) * DIVISION_ENTRIES
    table, last = list(NO_DIVISIONS), 0
    for position, (name, text) in enumerate(value):
        count = _power_of_two(key, text, or_zero=True)
        if name == ">":
            start = last if version < (2, 10) else last + 1
            table[start:] = [count] * (DIVISION_ENTRIES - start)
            continue
        last = min(_power_of_two(key, name, or_zero=False).bit_length() - 1, DIVISION_ENTRIES - 1)
        if position == 0:
            table[:last] = [count] * last
        table[last] = count
    return tuple(table)


def _power_of_two(key: str, text: str, *, or_zero: bool) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if number < 0 or number & (number - 1) or (number == 0 and not or_zero):
        raise SettingsError(f"{key}: takes powers of two, such as 8 or [256:1,512:2,>:4], not {text!r}.")
    return number
