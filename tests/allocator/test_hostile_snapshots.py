"""Hostile, damaged and foreign files: reading them runs nothing, ends, and ends in one SnapshotError or in a snapshot."""

from __future__ import annotations

import contextlib
import copy
import gc
import gzip
import json
import os
import pickle
import pickletools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbguard.errors import NbguardError, SnapshotError
from nbguard.memory.allocator.replay.replay import replay
from nbguard.memory.allocator.replay.whatif import what_if
from nbguard.memory.allocator.snapshot.read import load_snapshot
from nbguard.memory.allocator.snapshot.unpickle import _CALLS, _OPCODES, unpickle, unpickle_before
from nbguard.plain_data import DEEPEST
from tests.allocator import oracle
from tests.allocator.test_oracle import RUNS
from tests.allocator.test_snapshot import FRAME, Json, loads, reader, small
from tests.thorough import examples

__all__ = ["reader"]  # the fixture


class Bomb:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_run(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    content = pickle.dumps(small() | {"extra": Bomb(os.mkdir, str(mark))}, protocol)

    with pytest.raises(SnapshotError, match=r"it asks for '.*mkdir', and a snapshot holds plain data only"):
        loads(tmp_path, content)

    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "the bomb is none"


def _many_ints() -> bytes:
    keys = b"".join(b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(50_000))
    return b"\x80\x04}(" + keys + b"u."


def _shared_segments() -> bytes:
    raw = small()
    raw["segments"] = raw["segments"] * 100_000
    return pickle.dumps(raw)


def _many_streams() -> bytes:
    trace = [{"action": "oom", "device_free": 0, "size": 512, "stream": stream} for stream in range(20_000)]
    return pickle.dumps(small() | {"device_traces": [trace]})


HOSTILE = {
    "streams": _many_streams(),
    "memo index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "bytearray length": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "text length": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "frame length": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f" + pickle.dumps(1),
    "colliding keys": _many_ints(),
    "long number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "long decimal": b"I" + b"9" * 100_000 + b"\n.",
    "marks": b"(" * 10_000_000,
    "nested lists": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "nested tuples as a key": b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.",
    "empty lists": b"\x80\x02](" + b"]" * 3_000_000 + b"e.",
    "memo entries": b"\x80\x04N" + b"\x94" * 3_000_000 + b".",
    "empty lists as json": b'{"segments": [' + b"[]," * 1_000_000 + b"[]]}",
    "itself": b"\x80\x02}q\x00X\x08\x00\x00\x00segmentsh\x00s.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02N\x51.",
    "build": b"\x80\x02}}b.",
    "inst": b"(ios\nsystem\n.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "set": b"\x80\x04\x8f.",
    "buffers": b"\x80\x05\x97.",
    "protocol": b"\x80\xff.",
    "no stop": b"\x80\x02N",
    "empty stack": b"\x80\x02.",
    "shared segments": _shared_segments(),
    "a torch checkpoint": b"PK\x03\x04" + b"\0" * 60,
    "a web page": b"<!DOCTYPE html><html></html>",
    "nothing": b"",
    "blanks": b"\n \n",
    "text": b"hello, world",
    "json nested": b"[" * 1_000_000,
    "json number": b'{"segments": [' + b"9" * 1_000_000 + b"]}",
    "json nan": b'{"segments": NaN}',
    "json cut": b'{"segments": [',
    "json other": b'{"cells": []}',
    "damaged gz": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03garbage",
    "cut gz": gzip.compress(b"{" * 5000)[:-12],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_and_foreign_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        loads(tmp_path, HOSTILE[name])

    message = str(caught.value)
    assert message.startswith("file: ")
    assert "\n" not in message
    assert len(message) < 300


def _nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"in": value} if kind == "dicts" else [value] if kind == "lists" else (value,)
    return value


UNREAD = (
    "extra",
    "segments.0.extra",
    "segments.0.frames",
    "segments.0.blocks.1.extra",
    "segments.0.blocks.0.frames.0.extra",
    "device_traces.0.0.extra",
    "device_traces.0.0.frames.0.extra",
    "device_traces.0.1.frames",
)
"""Places of a snapshot whose values nothing reads."""


@pytest.mark.parametrize("kind", ["dicts", "lists", "tuples"])
@pytest.mark.parametrize("place", UNREAD)
def test_what_is_nested_too_deep_is_refused_wherever_it_stands(place: str, kind: str, tmp_path: Path) -> None:
    raw = copy.deepcopy(small())
    for depth in (DEEPEST - 10, DEEPEST + 10):
        _change(place, _nested(depth, kind))(raw)
        for content in (pickle.dumps(raw), json.dumps(raw).encode()):
            if depth < DEEPEST:
                assert loads(tmp_path, content).segments
                continue
            with pytest.raises(SnapshotError, match=f"file: not a readable snapshot: it is nested more than {DEEPEST} deep"):
                loads(tmp_path, content)


@pytest.mark.parametrize("name", ["marks", "memo entries", "nested tuples as a key", "json nested", "itself"])
def test_what_a_refused_file_has_made_is_freed_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError):
        loads(tmp_path, HOSTILE[name])
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        with contextlib.suppress(SnapshotError):
            loads(tmp_path, HOSTILE[name])
        assert len(gc.get_objects()) - before < 100
    finally:
        gc.enable()


def test_a_file_that_unpacks_to_too_much(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(gzip.compress(b" " * 3_000_000))

    with pytest.raises(SnapshotError, match=r"it unpacks to more than 1 MiB"):
        load_snapshot(file, max_bytes=2**20)
    file.write_bytes(b" " * 3_000_000)
    with pytest.raises(SnapshotError, match=r"more than 1 MiB are not read"):
        load_snapshot(file, max_bytes=2**20)


def test_a_bomb_is_known_by_its_density(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="it unpacks to more than 250 times its size"):
        loads(tmp_path, gzip.compress(b" " * 70_000_000))


def test_a_trace_that_never_fits_is_followed_in_time(tmp_path: Path) -> None:
    def event(action: str, number: int) -> Json:
        return {"action": action, "addr": 2**40 + number * 2**21, "size": 2**21, "stream": 0}

    backwards = [event("segment_alloc", n) for n in range(2000)] + [event("segment_free", n) for n in reversed(range(2000))]
    to_and_fro = [event(action, n) for n in range(2000) for action in ("segment_alloc", "segment_free")]
    for trace in (backwards, to_and_fro):
        snapshot = loads(tmp_path, pickle.dumps({"segments": [], "device_traces": [trace]}))

        (found,) = replay(snapshot)

        assert (found.events, found.reserved, found.is_final_equal) == (4000, 0, True)


def _change(path: str, value: object) -> Callable[[Json], None]:
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))

    def change(raw: Any) -> None:
        for step in steps:
            raw = raw[step]
        raw[last] = value

    return change


CONTRADICTIONS = {
    "segments.0.total_size": 5,
    "segments.0.address": -1,
    "segments.0.blocks.1.address": 77,
    "segments.0.blocks.1.state": "asleep",
    "segments.0.blocks.1.size": True,
    "segments.0.blocks.1": [],
    "segments.0.segment_type": "medium",
    "segments.0.segment_pool_id": [1, 2, 3],
    "segments.0.device": 2**40,
    "segments.0": 5,
    "segments": {},
    "device_traces": {"0": []},
    "device_traces.0": 5,
    "device_traces.0.0": 5,
    "device_traces.0.0.addr": "x",
    "device_traces.0.0.size": 2**80,
    "device_traces.0.0.pool_id": None,
    "device_traces.0.0.frames": [5],
}


@pytest.mark.parametrize("path", CONTRADICTIONS)
def test_contradictions_are_said(path: str, tmp_path: Path) -> None:
    raw = small()
    _change(path, CONTRADICTIONS[path])(raw)

    with pytest.raises(SnapshotError, match="not a readable snapshot"):
        loads(tmp_path, pickle.dumps(raw))


def test_overlapping_segments(tmp_path: Path) -> None:
    raw = small()
    raw["segments"] *= 2

    with pytest.raises(SnapshotError, match="segments overlap"):
        loads(tmp_path, json.dumps(raw).encode())


# --- fuzz -------------------------------------------------------------------------------------------------------------------


_INSERTED = (b"\xff\xff\xff\x7f", b"(", b"]", b"}", b"r\xff\xff\xff\xff", b"cos\nsystem\n", b"R", b".")


def _mutated(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        place = rng.randrange(len(data))
        match rng.randrange(7):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                del data[place : place + rng.choice((1, 2, 8, 64))]
            case 3:
                data[place:place] = rng.choice(
                    (b"\xff\xff\xff\x7f", b"(", b"]", b"}", b"r\xff\xff\xff\xff", b"cos\nsystem\n", b"R", b".")
                )
            case 4:
                data[place : place + 8] = data[rng.randrange(len(data)) :][:8]
            case 5:
                other = rng.randrange(len(data))
                data[place:place] = data[other : other + rng.choice((1, 16, 256))]
            case 6:
                del data[place:]
        if not data:
            return b"\x80"
    return bytes(data)


def _mutated_value(raw: Json, rng: random.Random) -> Json:
    """Change one value deep inside, so that the file reads well and what it says is wrong."""
    raw = json.loads(json.dumps(raw))
    holder: Any = raw
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return raw
        key = rng.choice(keys)
        if isinstance(holder[key], (dict, list)) and rng.random() < 0.95:
            holder = holder[key]
            continue
        holder[key] = rng.choice((0, -1, 1, 512, 2**40, 2**70, None, True, "x", "alloc", "inactive", 1.5, [], {}, [[]]))
        return raw


def _examine(folder: Path, content: bytes) -> str:
    """Read a file and use what is in it, as the command line does; return how it ended."""
    try:
        found = loads(folder, content)
        for device in found.devices[:3]:
            what_if(found, device, [""], capacity=2**32)
        replay(found)
    except NbguardError as error:
        return type(error).__name__
    return "read"


@pytest.mark.parametrize("seed", range(20))
def test_mutated_files_end_in_a_snapshot_or_one_error(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    run = oracle.read(RUNS[seed % len(RUNS)])
    run["events"] = run["events"][-60:]
    raw = oracle.as_snapshot(run)
    raw["device_traces"][0][0]["frames"] = [FRAME]
    forms = [pickle.dumps(raw, 2), pickle.dumps(raw, 4), json.dumps(raw).encode(), gzip.compress(json.dumps(raw).encode())]
    ends: list[str] = []

    for number in range(examples(50)):
        if number % 5 == 4:
            ends.append(_examine(tmp_path, json.dumps(_mutated_value(raw, rng)).encode()))
        else:
            ends.append(_examine(tmp_path, _mutated(rng.choice(forms), rng)))

    assert set(ends) <= {"read", "SnapshotError", "SettingsError", "ModelError"}
    assert "SnapshotError" in ends


def test_the_unpickler_knows_opcodes_of_plain_data_only() -> None:
    """SECURITY.md lists what is read, and what is refused."""
    read = {opcode.name: {kind.name for kind in opcode.stack_after} for opcode in pickletools.opcodes if _is_read(opcode.code)}
    memo = {"GET", "BINGET", "LONG_BINGET", "MEMOIZE", "DUP"}  # objects that were read before

    assert {name for name, kinds in read.items() if "any" in kinds} == memo
    assert set().union(*read.values()) - {"any", "mark"} == {
        *("int", "int_or_bool", "bool", "float", "None", "str", "list", "tuple", "dict")
    }


def _is_read(code: str) -> bool:
    return ord(code) in _OPCODES.values() and ord(code) not in _CALLS


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), {1}, frozenset({1}), {1: 2}, 1 << 200, object, {"a": {(): 1}}])
@pytest.mark.parametrize("protocol", range(6))
def test_what_is_no_plain_data_is_refused(value: object, protocol: int) -> None:
    with pytest.raises(SnapshotError):
        unpickle(pickle.dumps(value, protocol))


def test_the_unpickler_reads_what_pythons_reads() -> None:
    rng = random.Random(7)

    def value(depth: int) -> object:
        atoms: list[Callable[[], object]] = [
            lambda: rng.randrange(-(2**70), 2**70) >> rng.randrange(70),
            lambda: rng.choice(["", "alloc", "ä→\U0001f600", "x" * 300]),
            lambda: rng.choice([None, True, False, 0.5, -1e300, ()]),
        ]
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(atoms)()
        items = [value(depth - 1) for _ in range(rng.choice((0, 1, 2, 3, 4, 7, 1500 if depth == 3 else 5)))]
        return rng.choice([lambda: items, lambda: tuple(items), lambda: {f"k{i}": item for i, item in enumerate(items)}])()

    for _ in range(examples(60)):
        made = [value(3), value(2)]
        made.append(made[0])
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            content = pickle.dumps(made, protocol)
            found = unpickle(content)
            assert found == made
            assert (found[0] is found[2]) or type(found[0]) not in (list, dict)


@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_the_entries_before_a_key_are_read_from_the_beginning_of_a_pickle(protocol: int) -> None:
    first = {"segments": [{"blocks": [1, 2]}] * 3, "settings": "none"}
    content = pickle.dumps(first | {"traces": [{"n": n} for n in range(40_000)]}, protocol)

    assert unpickle_before(content[: len(content) * 9 // 10], "traces") == first
    assert unpickle_before(content, "another") is None


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_before_a_key_is_read_of_a_hostile_file(name: str) -> None:
    found = unpickle_before(HOSTILE[name], "device_traces")
    assert found is None if name != "streams" else found == {"segments": small()["segments"]}


def test_messages_name_the_file_only(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        loads(tmp_path, b"hello")

    assert re.match(r"file: not a readable snapshot: ", str(caught.value))
    assert str(tmp_path) not in str(caught.value)
