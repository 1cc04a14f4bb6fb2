"""Out-of-memory errors in exceptions of all kinds, and the host's memory where it can be faked: cgroups of both versions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbguard.memory.cleanup.apply.oom_observer import attach, detach
from nbguard.memory.cleanup.apply.tracebacks import Placeholder
from nbguard.memory.scan.devices.host import host_facts
from nbguard.memory.scan.oom.chain import ran_out
from nbguard.memory.scan.oom.last_error import PLACEHOLDERS
from nbguard.memory.scan.oom.names import made_by, names_in, names_of_functions, reached_by, replaced_by
from nbguard.memory.scan.roots.tracebacks import error_parts, error_roots
from tests.scan.test_oom_message import CPU, CUDA

KiB, MiB, GiB = 1024, 1024**2, 1024**3


def _raised(error: BaseException, cause: BaseException | None = None, context: BaseException | None = None) -> BaseException:
    error.__cause__, error.__context__ = cause, context
    return error


class ProxyError(Exception):
    """An exception that must not be asked."""

    __class__ = property(lambda self: pytest.fail("__class__"))  # type: ignore[assignment]
    args = property(lambda self: pytest.fail("args"))  # type: ignore[assignment]

    def __str__(self) -> str:
        pytest.fail("str")

    __repr__ = __bool__ = __len__ = __eq__ = __hash__ = __str__  # type: ignore[assignment]


def test_the_error_itself_its_cause_and_what_it_came_after() -> None:
    oom = RuntimeError(CPU)

    assert ran_out(oom)
    assert ran_out(_raised(ValueError("x"), cause=oom))
    assert ran_out(_raised(ValueError("x"), context=oom))
    assert ran_out(_raised(KeyError("x"), context=_raised(ValueError("y"), cause=oom)))
    assert not ran_out(_raised(ValueError("x"), cause=KeyError("y"), context=OSError(2, "no such file")))
    assert ran_out(MemoryError())
    assert ran_out(OSError(12, "Cannot allocate memory"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups")
def test_a_part_of_a_group() -> None:
    assert ran_out(ExceptionGroup("several", [ValueError("x"), RuntimeError(CUDA)]))  # noqa: F821
    assert not ran_out(ExceptionGroup("several", [ValueError("x")]))  # noqa: F821


def test_a_chain_that_bites_its_tail_and_a_long_one_end() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__context__, second.__context__ = second, first
    assert not ran_out(first)
    chain = RuntimeError(CPU)
    for _ in range(10_000):
        chain = _raised(ValueError("x"), context=chain)  # type: ignore[assignment]
    assert not ran_out(chain)


def test_exceptions_of_the_users_are_not_asked() -> None:
    assert not ran_out(ProxyError("x"))
    assert ran_out(_raised(ProxyError("x"), cause=RuntimeError(CPU)))


@pytest.mark.parametrize("what", [None, 3, "CUDA out of memory", object(), ValueError, ProxyError])
def test_what_is_no_exception_is_no_error(what: object) -> None:
    assert ran_out(what) is False  # type: ignore[arg-type]


def test_attaching_without_torch_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stand_in in (None, object(), sys):
        if stand_in is None:
            monkeypatch.delitem(sys.modules, "torch", raising=False)
        else:
            monkeypatch.setitem(sys.modules, "torch", stand_in)
        assert attach() is False
        detach()


# --- names of a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "at", "reads", "binds"),
    [
        ("y = net(x)", 1, {"net", "x"}, set()),
        ("a = 1\ny = net(a)\nz = 2", 2, {"net", "a"}, {"a"}),
        ("xs = []\nwhile True:\n    xs.append(f())\n    b = 1", 3, {"xs", "f"}, {"xs", "b"}),
        ("for i in r:\n    y = f(i)", 2, {"r", "f", "i"}, {"i", "y"}),
        ("def f():\n    inner = 1\ny = f()", 3, {"f"}, {"f"}),
        ("if True:\n    a = 1\nb = g(a)", 3, {"a", "g"}, {"a"}),
        ("get_ipython().run_cell_magic('time', '', 'a = 1\\ny = f(a)\\n')", 1, {"get_ipython", "f", "a"}, {"a", "y"}),
        ("this is no code", 1, set(), set()),
        ("", 0, set(), set()),
    ],
)
def test_names_that_a_cell_reads_and_had_bound(source: str, at: int, reads: set[str], binds: set[str]) -> None:
    assert names_in(source, at) == (reads, binds)


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_unfrozen")
def test_functions_that_gc_freeze_hides_may_reach_any_name() -> None:
    namespace: dict[str, Any] = {}
    exec("def forward(): return weights", namespace)
    functions = names_of_functions(namespace)
    assert functions == {"weights"}
    assert reached_by("x = y", namespace, functions) == {"x", "y", "weights"}
    assert made_by("x = 1; weights = 2", 9, functions) == {"x"}

    gc.freeze()

    assert names_of_functions(namespace) is None
    assert reached_by("x = y", namespace, None) is None
    assert made_by("x = 1; weights = 2", 9, None) == set()


@pytest.mark.parametrize(
    ("source", "replaced"),
    [
        ("x = f()\nold = g(x)\nprint(old)", {"x", "old"}),
        ("x = old\nold = g(x)", {"x"}),
        ("for batch in loader:\n    loss = f(batch)\n    loss.backward()", {"batch", "loss"}),
        ("for _ in range(3):\n    for batch in loader:\n        loss = f(batch)\n    print(n)", {"_", "batch", "loss"}),
        ("for batch in loader:\n    loss = f(batch)\nprint(loss)", {"batch"}),  # there may be no batch
        ("for batch in loader:\n    total += batch\n    loss = loss * 2", {"batch"}),
        ("for batch in loader:\n    if batch: loss = f(batch)\n    print(loss)", {"batch"}),
        ("while g():\n    loss = f()\nelse:\n    print(loss)", set()),
        ("for batch in loader:\n    weights = f(batch)", {"batch"}),  # a function of the notebook reads them
        ("def f(x):\n    old = x\nx = f(1)", {"f"}),
        ("get_ipython().run_line_magic('run', 'train.py')\nx = 1", set()),
        ("x =", set()),
    ],
)
def test_the_names_whose_values_no_run_can_read(source: str, replaced: set[str]) -> None:
    assert replaced_by(source, frozenset({"weights"})) == replaced
    assert replaced_by(source, None) == set()


@pytest.mark.usefixtures("_unfrozen")
def test_an_attribute_is_no_name_that_a_function_may_reach() -> None:
    """Every callback of fastai says `self.learn`: that does not lead to the notebook's `learn`."""
    namespace: dict[str, Any] = {"learn": 1}
    exec("class Typo:\n    def after_pred(self): self.learn.pred = [self.model.eval() for n in range(count)]", namespace)
    functions = names_of_functions(namespace)
    assert functions == {"range", "count"}
    assert reached_by("x = y", namespace, functions) == {"x", "y", "range", "count"}
    assert made_by("learn = 1", 9, functions) == {"learn"}


@pytest.mark.usefixtures("_unfrozen")
@pytest.mark.parametrize(
    "code", ["import __main__; return __main__.learn", "return sys.modules['__main__'].learn", "return shell.user_ns['learn']"]
)
def test_a_function_that_goes_to_the_notebook_by_another_way_may_reach_any_name(code: str) -> None:
    namespace: dict[str, Any] = {"learn": 1}
    exec(f"def reaches(): {code}", namespace)
    assert reached_by("x = y", namespace, names_of_functions(namespace)) is None


# --- the host ---------------------------------------------------------------------------------------------------------


def _write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n", encoding="ascii")
    return root


MEMINFO = "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\nHugePages_Total:       0"


def test_this_machine() -> None:
    host = host_facts()

    assert host.room is not None
    assert host.total is not None
    assert 0 < host.room < host.total


def test_a_machine_without_limits(tmp_path: Path) -> None:
    host = host_facts(_write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user.slice"}))

    assert (host.total, host.available, host.group_limit, host.group_room) == (8 * GiB, 4 * GiB, None, None)
    assert host.room == 4 * GiB


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """What can be dropped of the cache is not counted as used; of several limits the one that leaves least counts."""
    group = {
        "sys/fs/cgroup/pod/memory.max": 3 * GiB,
        "sys/fs/cgroup/pod/memory.current": 2 * GiB,
        "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GiB // 2}",
        "sys/fs/cgroup/pod/box/memory.max": "max",
        "sys/fs/cgroup/pod/box/memory.current": GiB,
    }
    host = host_facts(_write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/pod/box", **group}))

    assert (host.group_limit, host.group_room, host.room) == (3 * GiB, GiB + GiB // 2, GiB + GiB // 2)
    inner = host_facts(_write(tmp_path, {"sys/fs/cgroup/pod/box/memory.max": GiB + 5}))
    assert (inner.group_limit, inner.group_room) == (GiB + 5, 5)


def test_a_container_of_version_1_that_sees_only_itself(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GiB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GiB,
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0",
    }

    host = host_facts(_write(tmp_path, files))

    assert (host.group_limit, host.group_room) == (2 * GiB, GiB)
    free = host_facts(_write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712}))
    assert free.group_limit is None


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)

    assert host_facts(tmp_path).room is None
    assert host_facts(tmp_path).shm_total is None


def test_placeholders_are_known_by_the_module_of_their_class() -> None:
    """The scan must not import what a cleanup has; it compares names."""
    assert Placeholder.__module__ == PLACEHOLDERS


class _Shell:
    """As much of a shell as holds a last error."""

    def __init__(self, error: BaseException | None) -> None:
        self.user_ns: dict[str, object] = {}
        self.last_execution_result = type("Result", (), {})()
        self.last_execution_result.error_in_exec = error


def test_what_an_error_holds_is_found_without_asking_it() -> None:
    """A proxy in an error's place is no exception, and an exception that must not be asked is one."""
    inner = ValueError("x")
    proxy = _raised(ProxyError(), cause=inner)

    parts = error_parts(_Shell(proxy))

    assert list(map(id, parts.errors.values())) == [id(proxy), id(inner)]
    assert [root.what for root in error_roots(_Shell(proxy)) if root.label == "last error"] == ["ProxyError"]
