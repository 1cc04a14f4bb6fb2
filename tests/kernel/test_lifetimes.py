"""What is over is taken back from the panel at once: without a scan where a weak reference tells, and without a cell."""

from __future__ import annotations

from tests.kernel.conftest import running
from tests.kernels import Kernel
from tests.panels import Panel

CYCLE = """
class Node: pass
import weakref
a = Node(); a.me = a; a.data = torch.ones(4 << 20); freed = weakref.ref(a)
del a
"""
"""16 MiB that only Python's collector can free. The collector is off until the test has it run."""


def _labels(heap: dict[str, object]) -> list[str]:
    return [row["label"] for row in heap["holders"]]  # type: ignore[attr-defined]


def test_rows_findings_and_cards_end_with_what_they_are_about(kernel: Kernel, panel: Panel) -> None:
    kernel.run("import gc; gc.disable()").ok()
    kernel.run(CYCLE).ok()
    before = panel.heap(lambda heap: heap["stale"] >= 16 << 20)

    kernel.run_silently("gc.collect()")  # as Python does it itself: no cell
    after = panel.heap(lambda heap: heap["stale"] == 0 and heap["heap"] > before["heap"])
    assert "unreachable cycles" not in _labels(after)

    kernel.run(CYCLE + "big = torch.ones(2 << 20)").ok()
    asked = panel.heap(lambda heap: "big" in _labels(heap) and heap["stale"] >= 16 << 20)
    gone = "import pathlib, time; gc.collect(); del big\nwhile not pathlib.Path('enough').exists(): time.sleep(0.02)"
    with running(kernel, gone) as ended:
        during = panel.heap(lambda heap: heap["heap"] > asked["heap"] and heap["stale"] == 0)
        assert during["cell"] == asked["cell"], "the heap was looked at beside the cell"
        assert "big" not in _labels(panel.heap(lambda heap: "big" not in _labels(heap)))
        (kernel.cwd / "enough").touch()
        ended().ok()

    kernel.run("m = nn.Linear(1 << 10, 1 << 10); m").ok()
    kernel.run("del m").ok()
    told = panel.heap(lambda heap: heap["notices"])
    [notice] = told["notices"]
    assert notice[4] == kernel.value("get_ipython().execution_count") - 1  # its cell
    panel.tell({"op": "dismiss", "key": notice[3]})
    panel.heap(lambda heap: heap["heap"] > told["heap"] and not heap["notices"])
    assert panel.look()["notices"] == []  # it stays off
    kernel.run("m = nn.Linear(1 << 10, 1 << 10); m").ok()
    kernel.run("del m").ok()
    assert panel.heap(lambda heap: heap["notices"])["notices"], "the next event is as loud"


def test_the_card_ends_with_the_lack_of_memory(kernel: Kernel, panel: Panel) -> None:
    kernel.run("%gpumem simulate 1GiB").ok()
    kernel.run("cache = [torch.empty(1 << 26) for _ in range(3)]").ok()
    cell = kernel.run("batch = torch.empty(1 << 27)")
    number = kernel.value("get_ipython().execution_count") - 1
    card = panel.heap(lambda heap: heap["oom"])["oom"]
    assert card["cell"] == number
    for fix in card["fixes"]:  # the panel's card is the cell's
        assert all(command in cell.text for command in fix["commands"])
        assert fix["words"].split(": ")[-1] in cell.text or fix["commands"]
    assert ["%reset_gpu cache"] in [fix["commands"] for fix in card["fixes"]]
    kernel.run("pass").ok()
    assert panel.look()["oom"]["key"] == card["key"], "nothing has changed yet"
    kernel.run("%reset_gpu cache").ok()
    panel.heap(lambda heap: heap["oom"] is None and heap["heap"] > 0)
    kernel.run("cache = [torch.empty(1 << 26) for _ in range(3)]").ok()
    assert panel.look()["oom"] is not None, "it lacks memory again"
    kernel.run("%gpumem simulate off").ok()
    assert panel.look()["oom"] is None


def test_a_plan_that_finds_nothing_takes_the_offer_back(kernel: Kernel, panel: Panel) -> None:
    """The counters may not have told: an object of the same size has taken its place."""
    kernel.run("import gc; gc.disable()").ok()
    kernel.run(CYCLE).ok()
    before = panel.heap(lambda heap: heap["stale"] >= 16 << 20)
    kernel.run_silently("gc.collect()")
    plan = panel.plan("clean_stale")
    assert plan["refused"]
    assert panel.heap(lambda heap: heap["heap"] > before["heap"])["stale"] == 0


def test_every_step_but_the_collection_can_be_left_out(kernel: Kernel, panel: Panel) -> None:
    """Of a cleanup and of a release of several rows at once."""
    kernel.run("learn = learner(); learn.fit(1)\nfirst, second = torch.ones(1 << 20), torch.ones(1 << 20)").ok()
    kernel.run("learn.xb, learn.pred = (torch.ones(1 << 19),), torch.ones(1 << 19)").ok()
    heap = panel.look()
    plan = panel.plan("clean_stale")
    keys = [row["key"] for row in plan["rows"]]
    assert all(keys), plan["rows"]
    without = panel.plan("clean_stale", keep=[keys[0]])
    assert (without["rows"][0]["key"], without["rows"][0]["kept"]) == (keys[0], True)
    assert without["promised"] < plan["promised"]
    assert len(without["rows"]) == len(plan["rows"]) or without["refused"]

    ids = [row["id"] for row in heap["holders"] if row["label"] in ("first", "second")]
    both = panel.plan("release", heap=heap["heap"], ids=ids)
    assert {row["key"] for row in both["rows"]} >= {"first", "second"}
    one = panel.plan("release", heap=heap["heap"], ids=ids, keep=["second"])
    assert one["promised"] == both["promised"] // 2 == 4 << 20
    assert panel.apply(one)["realised"] == 4 << 20
    assert kernel.value("['first' in globals(), 'second' in globals()]") == [False, True]
    rid = panel.ask("plan", action="release", heap=panel.look()["heap"], ids=[], keep=[])
    assert panel.wait("refused", rid=rid)["why"]
