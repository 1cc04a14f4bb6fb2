"""Saved snapshot files: in a form that PyTorch's own reader of snapshots takes."""

from __future__ import annotations

import functools
import pickle
import pickletools
from pathlib import Path

import pytest

from nbguard import load_snapshot, save_snapshot
from nbguard.memory.allocator.snapshot.snapshot import Sidecar
from nbguard.memory.snapshots import save
from tests.snapshots.test_saved import MIB, _raw

VIEWER_PROTOCOL = 4
"""The newest pickle protocol that PyTorch's MemoryViz.js takes."""


@pytest.mark.parametrize("default", [2, 4, 5])
def test_a_saved_snapshot_is_of_protocol_4_whatever_pythons_default_is(
    default: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    viz = pytest.importorskip("torch.cuda._memory_viz")
    raw = _raw(3 * MIB, MIB)
    raw["segments"][0] |= {"allocated_size": 4 * MIB, "active_size": 4 * MIB}
    monkeypatch.setattr(save, "torch_snapshot", lambda: raw)
    monkeypatch.setattr(save, "sidecar_of", lambda devices, settings: Sidecar(torch_version="2.13.0"))
    monkeypatch.setattr(save.pickle, "dumps", functools.partial(pickle.dumps, protocol=default))

    files = save_snapshot(tmp_path / "run.pickle", namespace={})

    data = (tmp_path / "run.pickle").read_bytes()
    opcodes = list(pickletools.genops(data))
    assert (opcodes[0][0].name, opcodes[0][1]) == ("PROTO", VIEWER_PROTOCOL)
    assert max(opcode.proto for opcode, _, _ in opcodes) <= VIEWER_PROTOCOL
    assert pickle.loads(data) == raw
    assert "memory" in viz.trace_plot(pickle.loads(data)).lower()
    assert [segment.total_size for segment in load_snapshot(tmp_path / "run.pickle").segments] == [5 * MIB]
    assert (files.nbytes, files.segments, files.events) == (len(data), 1, 0)
