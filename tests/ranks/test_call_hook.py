"""The calls that are noted in a process group of this process alone."""

from __future__ import annotations

import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbguard.training.ranks.call_hook import KEPT, TABLE, CallHook, CallLog
from nbguard.training.ranks.rank_file import RankFile


@pytest.fixture
def dist(torch_process: None) -> Iterator[Any]:
    """torch.distributed with a group of one."""
    import torch.distributed as module

    module.init_process_group("gloo", store=module.HashStore(), rank=0, world_size=1)
    yield module
    module.destroy_process_group()


@pytest.fixture
def log(dist: Any, tmp_path: Path) -> Iterator[CallLog]:
    """The log of a hook that is in."""
    file = RankFile.create(tmp_path / "0-1.rank")
    hook = CallHook(file.calls)
    hook.install()
    yield file.calls
    hook.remove()
    file.close()


def words(log: CallLog) -> list[tuple[Any, ...]]:
    return [(call.name, call.elements, call.dtype, call.detail, call.is_done, call.is_p2p) for call in log.read()]


def test_a_call_is_noted_in_whatever_way_its_arguments_are_given(dist: Any, log: CallLog) -> None:
    import torch

    x, group = torch.ones(3, 2), dist.new_group([0])
    dist.all_reduce(x)
    dist.all_reduce(tensor=x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.all_reduce(x, dist.ReduceOp.MAX, group)
    dist.broadcast(x.double(), 0)
    dist.all_gather([torch.empty(4)], torch.ones(4))
    dist.barrier()
    work = dist.all_reduce(x, async_op=True)
    work.wait()

    plain = ("all_reduce", 6, "float32", "", True, False)
    largest = ("all_reduce", 6, "float32", "op=max", True, False)
    assert words(log) == [
        plain,
        plain,
        largest,
        largest,
        ("broadcast", 6, "float64", "src=0", True, False),
        ("all_gather", 4, "float32", "", True, False),
        ("barrier", None, "", "", True, False),
        plain,
    ]
    calls = log.read()
    assert [call.group for call in calls] == [calls[0].group] * 3 + [group.group_name] + [calls[0].group] * 4
    assert [call.position for call in calls if call.group == calls[0].group] == list(
        range(calls[0].position, calls[0].position + 7)
    )
    assert [call.place.partition(":")[0] for call in calls] == ["test_call_hook.py"] * 8
    assert (log.count, log.waits()) == (8, False)


def test_each_line_has_its_own_words_and_the_same_line_the_same(dist: Any, log: CallLog) -> None:
    import torch

    for size in (1, 2, 1):
        dist.all_reduce(torch.ones(size)); one = sys._getframe().f_lineno  # fmt: skip  # noqa: E702
        dist.all_reduce(torch.ones(size))

    calls = log.read()
    assert [call.elements for call in calls] == [1, 1, 2, 2, 1, 1]
    assert [int(call.place.split(":")[1].split(" ")[0]) - one for call in calls] == [0, 1] * 3


def test_a_librarys_call_is_of_the_innermost_line_of_the_users(dist: Any, log: CallLog) -> None:
    """However deep below it the library calls, also where a call from the same place stood elsewhere before."""
    import torch

    library = {"tensor": torch.ones(1), "dist": dist}
    exec(compile(_LIBRARY, f"{sysconfig.get_paths()['purelib']}/library.py", "exec"), library)
    reduce, call = library["reduce"], library["call"]

    def inner() -> None:
        reduce(2)

    lines = []
    for _ in range(3):
        reduce(0); lines.append(_here())  # fmt: skip  # noqa: E702
        reduce(9); lines.append(_here())  # fmt: skip  # noqa: E702
        call(inner, 6); lines.append(inner.__code__.co_firstlineno + 1)  # fmt: skip  # noqa: E702
        call(reduce, 5, 3); lines.append(_here())  # fmt: skip  # noqa: E702
        thread = threading.Thread(target=reduce, args=(4,))  # the user has no line there
        thread.start()
        thread.join()
        reduce(9); lines.append(_here())  # fmt: skip  # noqa: E702

    places = [call.place.partition(" in ")[0] for call in log.read()]
    assert [place for place in places if place] == [f"test_call_hook.py:{line}" for line in lines]
    assert places[4::6] == ["", "", ""]


def _here() -> int:
    return sys._getframe(1).f_lineno


_LIBRARY = """
def reduce(depth):
    return reduce(depth - 1) if depth else dist.all_reduce(tensor)

def call(function, depth, *args):
    return call(function, depth - 1, *args) if depth else function(*args)
"""
"""Of a library that makes its collectives some frames below."""


def test_a_call_that_fails_is_the_users_error_and_has_not_returned(dist: Any, log: CallLog) -> None:
    import torch

    with pytest.raises(RuntimeError):
        dist.broadcast(torch.ones(2), 5)
    with pytest.raises(TypeError):
        dist.all_reduce("no tensor")
    with pytest.raises(TypeError):
        dist.all_reduce()

    assert words(log)[0] == ("broadcast", 2, "float32", "src=5", False, False)
    assert not any(call.is_done for call in log.read())


def test_a_call_by_another_is_noted_at_the_same_position(dist: Any, log: CallLog) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(2))

    calls = log.read()
    assert {call.position for call in calls} == {calls[0].position}
    assert all(call.is_done and call.place.startswith("test_call_hook.py") for call in calls)


def test_more_different_calls_than_the_table_holds_have_their_own_words(dist: Any, log: CallLog) -> None:
    import torch

    x = torch.ones(2 * TABLE)
    for size in range(1, TABLE + 20):
        dist.all_reduce(x[:size])
    for size in (5, TABLE):
        dist.all_reduce(x[:size])

    assert [call.elements for call in log.read()] == [*range(TABLE + 22 - KEPT, TABLE + 20), 5, TABLE]


def test_a_group_that_is_gone_does_not_lend_its_name_to_the_next(dist: Any, log: CallLog) -> None:
    import torch

    names = []
    for _ in range(8):
        group = dist.new_group([0])
        names.append(group.group_name)
        for _ in range(2):
            dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group

    assert [call.group for call in log.read()] == [name for name in names for _ in range(2)]
