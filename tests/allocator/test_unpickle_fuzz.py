"""The unpickler beside Python's own: on honest input both return the same, on damaged input it returns or raises one error."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.snapshot.unpickle import unpickle
from tests.thorough import examples

LONGEST = 10**30
"""Numbers of more than 16 bytes or 32 characters are refused by design; no address or size is as long."""

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-LONGEST, LONGEST)
    | st.sampled_from((0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**63, -1))
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    shared = children.map(lambda child: [child, {"frames": child}, child])  # one object, referred to again
    return (
        st.lists(children, max_size=6)
        | st.lists(children, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=20), children, max_size=5)
        | shared
    )


DATA = st.recursive(ATOMS, _containers, max_leaves=40)


def _same(mine: Any, real: Any) -> bool:
    """Return whether two objects are equal in types too, all the way down."""
    if type(mine) is not type(real):
        return False
    if type(real) is dict:
        return [*mine] == [*real] and all(_same(mine[key], real[key]) for key in real)
    if type(real) in (list, tuple):
        return len(mine) == len(real) and all(map(_same, mine, real))
    return bool(mine == real)


@settings(max_examples=examples(150), deadline=None)
@given(DATA, st.integers(0, 5))
@example({"segments": [{"blocks": [{"size": 2**40}] * 3}] * 300}, 4)
@example([LONGEST, -LONGEST], 0)
@example([float(number) for number in range(2000)], 0)
def test_honest_pickles_are_read_as_python_reads_them(data: Any, protocol: int) -> None:
    pickled = pickle.dumps(data, protocol=protocol)

    assert _same(unpickle(pickled), pickle.loads(pickled))


@settings(max_examples=examples(150), deadline=None)
@given(DATA, st.integers(0, 5), st.data())
def test_damaged_pickles_are_read_or_refused_by_one_error(data: Any, protocol: int, draw: st.DataObject) -> None:
    pickled = bytearray(pickle.dumps(data, protocol=protocol))
    for _ in range(draw.draw(st.integers(1, 3))):
        pickled[draw.draw(st.integers(0, len(pickled) - 1))] = draw.draw(st.integers(0, 255))

    with contextlib.suppress(SnapshotError):
        unpickle(bytes(pickled[: draw.draw(st.integers(0, len(pickled)))]))
