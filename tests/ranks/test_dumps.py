"""Dumps of PyTorch's flight recorder from files: read without running anything, whatever is in them."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import pytest

import nbguard
from nbguard.errors import RankFactsError
from nbguard.training.ranks.analysis.flight_dump import read_dump

DATA = Path(__file__).parents[1] / "data" / "ranks"


@pytest.mark.parametrize("world", [2, 4])
def test_real_dumps_say_who_left_out_what(world: int) -> None:
    diagnosis = nbguard.load_ranks(DATA / f"skips_before_a_barrier-{world}-rank_{rank}" for rank in range(world))

    cause = diagnosis.faults[0]
    assert (cause.kind, cause.ranks, cause.collective, cause.last_common) == ("left out", (1,), "all_reduce", 3)
    assert cause.place.startswith("faults.py:")
    assert "4 × float32" in cause.what
    assert diagnosis.world == world


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_with_fewer_batches_gets_join_as_a_remedy(world: int) -> None:
    diagnosis = nbguard.load_ranks(DATA / f"fewer_batches_with_batchnorm-{world}-rank_{rank}" for rank in range(world))

    cause = diagnosis.faults[0]
    assert (cause.kind, cause.ranks, cause.collective) == ("uneven batches", (1,), "broadcast")
    assert "Join([model])" in cause.remedy


def test_a_missing_rank_is_no_crash() -> None:
    diagnosis = nbguard.load_ranks([DATA / "skips_before_a_barrier-4-rank_0", DATA / "skips_before_a_barrier-4-rank_3"])

    assert diagnosis.faults[0].kind == "unknown"
    assert "ranks 1 and 2" in diagnosis.faults[0].what


def test_five_hundred_mutated_dumps_run_nothing_and_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("something of a dump was run")

    for name in ("system", "popen", "unlink", "remove"):
        monkeypatch.setattr(os, name, run)
    good = (DATA / "skips_before_a_barrier-2-rank_0").read_bytes()
    source = random.Random(20)
    refusals: list[str] = []
    for number in range(500):
        data = bytearray(good)
        for _ in range(source.choice((1, 1, 2, 8, 40))):
            at = source.randrange(len(data))
            if number % 3 == 0:
                del data[at : at + source.randrange(1, 40)]
            elif number % 3 == 1:
                data[at] = source.randrange(256)
            else:
                data[at:at] = bytes(source.choices(range(256), k=source.randrange(1, 8)))
        path = tmp_path / "trace_rank_0"
        path.write_bytes(bytes(data))
        refusals += _refusal(path)
    assert len(refusals) > 250
    assert all("\n" not in text and text.startswith("trace_rank_0: ") for text in refusals)


def _refusal(path: Path) -> list[str]:
    """Return the message with which a file is refused, if it is."""
    try:
        nbguard.load_ranks([path])
    except RankFactsError as error:
        return [str(error)]
    return []


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /nowhere",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_dump_that_asks_for_code_is_refused(protocol: int) -> None:
    with pytest.raises(RankFactsError, match=r"asks for|no opcode|plain data"):
        read_dump(pickle.dumps({"entries": [_Evil()]}, protocol=protocol))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "ends too early"),
        (b"{", "not JSON"),
        (b'{"nbguard_rank": 9}', "does not say nbguard_rank = 1"),
        (b'{"nbguard_rank": 1, "rank": 0}', "its field 'world' is missing"),
        (b'{"nbguard_rank": ' + b"[" * 200, "not JSON"),
        (
            b"\x80\x02}(X\x07\x00\x00\x00entries]X\x01\x00\x00\x00x" + b"]" * 200 + b"a" * 199 + b"u.",
            "it is nested more than 100 deep",
        ),
        (pickle.dumps([1]), "no list of entries"),
        (pickle.dumps({"entries": [{}]}), "damaged"),
        (b"\x80\x04\x95\xff", "ends too early"),
    ],
)
def test_other_files_are_one_line(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(text)

    with pytest.raises(RankFactsError, match=says) as refused:
        nbguard.load_ranks([path])
    assert "\n" not in str(refused.value)


def test_files_must_say_their_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes((DATA / "skips_before_a_barrier-2-rank_0").read_bytes())

    with pytest.raises(RankFactsError, match="end its name with the number of the rank"):
        nbguard.load_ranks([path])
    with pytest.raises(RankFactsError, match="give one dump per rank"):
        nbguard.load_ranks([])
    with pytest.raises(RankFactsError, match="cannot be read"):
        nbguard.load_ranks([tmp_path / "missing_1"])
