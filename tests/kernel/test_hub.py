"""The hub in a real kernel: live while a fit runs, and what a sidebar asks for is done where and when it may be."""

from __future__ import annotations

import re
import statistics
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.kernel.conftest import LEARNER, held, running, training
from tests.kernels import Kernel, wait_until
from tests.panels import HUB, Panel, settle
from tests.zoo.cases import SHOWS_SMALL


def _is_well_under_way(tick: dict[str, Any]) -> bool:
    return bool(tick["fit"]) and (tick["fit"]["epoch"] or 0) >= 2


def test_it_is_live_while_a_fit_runs(kernel: Kernel, panel: Panel) -> None:
    kernel.run("learn = learner()").ok()
    panel.heap(lambda heap: any(each["label"] == "learn" for each in heap["experiments"]))

    with training(kernel) as end:
        first = panel.until(lambda tick: tick["cell"] == 4)
        tick = panel.until(lambda tick: _is_well_under_way(tick) and tick["fit"]["batches"] == 32)
        asked = time.monotonic()
        rid = panel.ask("plan", action="clean_stale")
        panel.wait("ack", rid=rid)
        handled = time.monotonic() - asked
        answer = panel.wait("plan", rid=rid)["plan"]
        last = panel.until(lambda tick: tick["n"] >= first["n"] + 8)
        assert panel.calls_itself("busy", "execute_request")  # though it has handled a message meanwhile
        end().ok()

    times = [each["tick"]["t"] for each in panel.data("tick") if first["n"] <= each["tick"]["n"] <= last["n"]]
    gap = statistics.median(later - earlier for earlier, later in pairwise(times))
    print(f"click handled after {handled * 1000:.1f} ms while training; {1 / gap:.1f} ticks a second")
    assert tick["busy"]
    assert (tick["fit"]["label"], tick["fit"]["call"], tick["fit"]["batches"]) == ("learn", "fit", 32)
    assert "In[4]" in [mark["label"] for mark in first["marks"]]
    assert any(mark["label"].startswith("epoch ") for mark in last["marks"])  # a short one may fall between two ticks
    assert gap < 1  # of a machine that has other things to do, too
    assert answer["refused"]  # nothing is stale


def test_a_learner_smaller_than_the_counters_notice_is_shown(kernel: Kernel, panel: Panel) -> None:
    """Nobody counts CPU tensors, and the process grows by less than a scan is made for."""
    panel.heap(lambda heap: heap["heap"] > 0)
    kernel.run("learn = learner()").ok()

    panel.heap(lambda heap: any(each["label"] == "learn" for each in heap["experiments"]))


def test_a_cell_that_ends_during_a_scan_beside_it_is_scanned_again(kernel: Kernel) -> None:
    """The panel says hello once, so that no other hello has the heap scanned."""
    kernel.run(f"{LEARNER}\n%load_ext nbguard").ok()
    kernel.run(
        "import nbguard.frontend.sidebar.hub.memory_states as states\n"
        "seen, go, real = threading.Event(), threading.Event(), states.timed_scan\n"
        "def slow(notebook):\n    found = real(notebook)\n    seen.set()\n    go.wait()\n    return found\n"
        "states.timed_scan = slow"
    ).ok()
    panel = Panel(kernel)
    try:
        with held(kernel, "seen.wait(); later = torch.ones(2**20)") as let_go:
            panel.hello(again=False)
            let_go()
        wait_until(lambda: kernel.value(f"{HUB}._settling is None"), "the hub to see that no cell follows")
        kernel.run_silently("go.set()")
        panel.heap(lambda heap: any(row["label"] == "later" for row in heap["holders"]))
    finally:
        panel.stop()


def test_it_says_how_a_training_went_on_until_the_next_cell(kernel: Kernel, panel: Panel) -> None:
    kernel.run("import nbguard\nfrom tests.survive.planted import TooLarge, net\nmodel = net()").ok()
    cell = "with nbguard.survive(model), TooLarge(4):\n    model(torch.ones(8, 6)).sum().backward()"
    assert "same weights" in kernel.run(cell).ok().stdout
    (sentence,) = panel.until(lambda tick: tick["survived"])["survived"]
    assert "2 pieces of 4 items" in sentence
    kernel.run("pass").ok()
    panel.until(lambda tick: not tick["survived"] and not tick["busy"])


def test_what_a_cell_had_in_its_hands_is_called_by_its_name_when_it_has_ended(kernel: Kernel, panel: Panel) -> None:
    kernel.run(
        "import pathlib\ndef make():\n    made = torch.ones(2**20)\n    pathlib.Path('made').touch()\n"
        "    while not pathlib.Path('gate').exists(): time.sleep(0.01)\n    return made"
    ).ok()
    panel.heap(lambda heap: heap["heap"] > 0)

    with running(kernel, "later = make()") as ended:
        wait_until((kernel.cwd / "made").exists, "the cell to hold something")
        panel.wait("ack", rid=panel.ask("refresh"))
        panel.heap(lambda heap: sum(row["nbytes"] for row in heap["holders"]) >= 4 * 2**20)  # as something of that cell's
        (kernel.cwd / "gate").touch()
        ended().ok()

    panel.heap(lambda heap: any(row["label"] == "later" for row in heap["holders"]))


def test_the_last_status_is_busy_while_a_cell_runs_and_idle_after_it(kernel: Kernel, panel: Panel) -> None:
    for _ in range(2):
        with held(kernel):
            panel.until(lambda tick: tick["busy"])
            for _ in range(5):
                panel.wait("ack", rid=panel.ask("cancel"))
            assert panel.calls_itself("busy", "execute_request")
        panel.until(lambda tick: not tick["busy"])
        assert panel.calls_itself("idle")


ACCIDENTS = """
learn = learner()
def fails(): raise ValueError("on purpose")
class Fails(Callback):
    def after_loss(self):
        if self.iter == 3: fails()
"""


def test_clean_stale_gives_back_what_it_promised(kernel: Kernel, panel: Panel) -> None:
    """The accidents of the example notebook: an error in a fit, a displayed Learner, losses with their graphs."""
    kernel.run(ACCIDENTS).ok()
    kernel.run("losses = [learn.loss_func(learn.model(x), y) for _ in range(3)]").ok()
    kernel.run("learner(nn.Linear(64, 4096), nn.Linear(4096, 3))").ok()
    kernel.run("broken = learner(); broken.fit(1, cbs=Fails())")
    kernel.run("del broken").ok()
    kernel.run("alive = weakref.WeakSet(o for o in gc.get_objects() if type(o) is Learner); len(alive)").ok()
    heap = panel.look()

    plan = panel.plan("clean_stale")
    outcome = panel.apply(plan)
    after = panel.heap(lambda found: found["heap"] > heap["heap"])

    assert {row["key"] for row in plan["rows"]} >= {"Out[5]", "last error"}
    assert outcome["promised"] == outcome["realised"] == plan["promised"] == heap["stale"]
    assert after["stale"] == 0
    assert [each["state"] for each in after["experiments"]] == ["live"]
    assert any(row["label"] == "losses" and "release" in row["can"] for row in after["holders"])
    assert kernel.value("(len(alive), len(losses))") == (1, 3)
    kernel.run("learn.fit(1); assert learn.recorder.losses").ok()


def test_what_a_cell_may_use_waits_for_its_end(kernel: Kernel, panel: Panel) -> None:
    kernel.run("spare = torch.zeros(1 << 20); ref = weakref.ref(spare)").ok()
    wanted = panel.row("spare")

    with held(kernel, "still = ref() is not None") as let_go:
        panel.until(lambda tick: tick["busy"])
        plan = panel.plan("release", **wanted)
        rid = panel.ask("apply", token=plan["token"])
        queued = panel.wait("queued", rid=rid)
        job = panel.until(lambda tick: tick["jobs"])["jobs"][0]
        let_go()
        outcome = panel.wait("done", rid=rid)["outcome"]

    assert (plan["when"], plan["irreversible"]) == ("cell_end", "spare is deleted: this cannot be undone")
    assert "when the cell ends" in queued["why"]
    assert (job["rid"], job["title"], job["phase"], job["why"]) == (rid, "Release spare", "queued", queued["why"])
    assert outcome["realised"] == plan["promised"] == 4 << 20
    assert kernel.value("(still, ref() is None, 'spare' in globals())") == (True, True, False)
    panel.until(lambda tick: not tick["busy"] and not tick["jobs"])


def test_what_waits_can_be_cancelled(kernel: Kernel, panel: Panel) -> None:
    kernel.run("spare = torch.zeros(1 << 20)").ok()
    wanted = panel.row("spare")

    with held(kernel):
        panel.until(lambda tick: tick["busy"])
        rid = panel.ask("apply", token=panel.plan("release", **wanted)["token"])
        panel.wait("queued", rid=rid)
        panel.ask("cancel", rid=rid)
        refused = panel.wait("refused", rid=rid)

    assert refused["why"] == "cancelled before it began; nothing was touched"
    panel.until(lambda tick: not tick["busy"])
    assert kernel.value("spare.numel()") == 1 << 20


def test_what_is_stale_goes_while_a_fit_runs_and_the_fit_does_not(kernel: Kernel, panel: Panel) -> None:
    kernel.run(ACCIDENTS).ok()
    kernel.run("broken = learner(); broken.fit(1, cbs=Fails())")
    kernel.run("del broken; alive = weakref.WeakSet(o for o in gc.get_objects() if type(o) is Learner)").ok()
    assert kernel.value("len(alive)") == 2

    with training(kernel) as end:
        panel.until(_is_well_under_way)
        plan = panel.plan("clean_stale")
        outcome = panel.apply(plan)
        epoch = panel.until(_is_well_under_way)["fit"]["epoch"]
        panel.until(lambda tick: _is_well_under_way(tick) and tick["fit"]["epoch"] > epoch)  # it goes on
        end().ok()

    assert plan["when"] == "now"
    assert outcome["realised"] == outcome["promised"] > 0
    assert kernel.value("len(alive)") == 1


def test_what_stays_beside_a_cell_is_named_and_goes_with_the_next_click(kernel: Kernel, panel: Panel) -> None:
    """A displayed Learner goes beside the cell. What a fit has left on a Learner that the cell may use does not."""
    kernel.run(ACCIDENTS).ok()
    kernel.run("kept = learner(); kept.fit(1, cbs=Fails())")
    kernel.run("learner()").ok()

    with held(kernel, "still = kept.xb[0] is not None") as let_go:
        panel.until(lambda tick: tick["busy"])
        beside = panel.plan("clean_stale")
        outcome = panel.apply(beside)
        click = panel.plan("clean_stale")
        rid = panel.ask("apply", token=click["token"])
        panel.wait("queued", rid=rid)
        let_go()
    rest = panel.wait("done", rid=rid)["outcome"]

    ((label, why),) = outcome["undone"]
    assert label.replace(" not cleared", " will be cleared") == click["rows"][0]["label"], "the step in the words of a plan"
    assert why == "not while the cell runs, as it may use it; Clean stale does it when the cell ends"
    assert beside["skipped"] == [f"{label}: {why}"]
    assert (beside["when"], click["when"]) == ("now", "cell_end")
    assert rest["promised"] == rest["realised"] > 0
    assert rest["undone"] == []
    assert kernel.value("(still, kept.xb[0])") == (True, None)


def test_the_learner_that_trains_is_never_touched(kernel: Kernel, panel: Panel) -> None:
    kernel.run("learn = learner()").ok()
    wanted = panel.row("learn")

    with training(kernel) as end:
        panel.until(_is_well_under_way)
        parking = panel.wait("plan", "refused", rid=panel.ask("plan", action="park", **wanted))
        release = panel.ask("apply", token=panel.plan("release", **wanted)["token"])
        queued = panel.wait("queued", rid=release)
        panel.ask("cancel", rid=release)
        panel.wait("refused", rid=release)
        end().ok()

    assert parking["why"] == "a fit is running on learn; park it when the fit ends"
    assert "when the cell ends" in queued["why"]
    assert kernel.value("len(learn.recorder.losses)") > 32


def test_a_release_beside_a_fit_is_done_when_the_cell_ends(kernel: Kernel, panel: Panel) -> None:
    kernel.run("learn = learner()").ok()
    wanted = panel.row("learn")

    with training(kernel) as end:
        panel.until(_is_well_under_way)
        plan = panel.plan("release", **wanted)
        release = panel.ask("apply", token=plan["token"])
        panel.wait("queued", rid=release)
        assert not panel.data("done", rid=release)
        end().ok()
    outcome = panel.wait("done", rid=release)

    assert outcome["outcome"]["realised"] == outcome["outcome"]["promised"] > 0
    assert plan["promised"] > 0, "it comes back when the cell's functions have ended"
    assert kernel.value("'learn' in globals()") is False


def test_parking_is_undone_by_its_names(kernel: Kernel, panel: Panel) -> None:
    kernel.run("learn = learner(); learn.fit(1); before = [p.clone() for p in learn.model.parameters()]").ok()

    parked = panel.apply(panel.plan("park", **panel.row("learn")))
    heap = panel.heap(lambda heap: any(each["state"] == "parked" for each in heap["experiments"]))
    back = panel.apply(panel.plan("unpark", names=parked["undo"]))

    assert parked["undo"] == ["learn"]
    assert parked["realised"] == parked["promised"] == back["realised"]
    assert [each["label"] for each in heap["experiments"] if each["state"] == "parked"] == ["learn"]
    kernel.run("assert all(map(torch.equal, before, learn.model.parameters())); learn.fit(1)").ok()


def test_why_names_the_ways(kernel: Kernel, panel: Panel) -> None:
    kernel.run("learn = learner(); best = [learn]").ok()
    wanted = panel.row("learn")

    why = panel.wait("why", rid=panel.ask("why", heap=wanted["heap"], id=wanted["ids"][0]))["why"]

    assert why["name"] == "learn"
    assert {path[0] for path in why["paths"]} >= {"learn", "best[0]"}


def test_rows_of_an_older_list_are_refused_and_the_new_list_is_sent(kernel: Kernel, panel: Panel) -> None:
    kernel.run("first = torch.zeros(1 << 20)").ok()
    wanted = panel.row("first")
    kernel.run("first = None; second = torch.zeros(1 << 20)").ok()
    panel.heap(lambda heap: heap["heap"] > wanted["heap"])
    heard = len(panel.data("heap"))

    rid = panel.ask("plan", action="release", **wanted)
    refused = panel.wait("refused", rid=rid)

    assert refused["why"] == "this list was out of date; it has been updated, please try again"
    assert len(panel.data("heap")) > heard
    assert kernel.value("second.numel()") == 1 << 20


def test_what_was_not_agreed_to_is_not_done(kernel: Kernel, panel: Panel) -> None:
    """Between a plan and its application the name gets another object, and more becomes stale."""
    kernel.run("spare = torch.zeros(1 << 20)").ok()
    release = panel.plan("release", **panel.row("spare"))
    kernel.run("spare = torch.ones(1 << 21)").ok()
    kernel.run("learner()").ok()
    clean = panel.plan("clean_stale")
    kernel.run("learner()").ok()

    anew = panel.wait("plan", "done", rid=panel.ask("apply", token=release["token"]))
    more = panel.wait("plan", "done", rid=panel.ask("apply", token=clean["token"]))

    assert anew["op"] == more["op"] == "plan"
    assert anew["plan"]["promised"] == 8 << 20
    assert {row["key"] for row in more["plan"]["rows"]} - {row["key"] for row in clean["rows"]} == {"Out[6]"}
    assert kernel.value("spare.numel()") == 1 << 21
    assert panel.apply(more["plan"])["realised"] == more["plan"]["promised"]
    refused = panel.wait("refused", rid=panel.ask("apply", token=clean["token"]))
    assert refused["why"] == "this plan is no longer known; ask for a new one"


def _settled_heap(kernel: Kernel, panel: Panel, label: str) -> dict[str, Any]:
    """Return the heap that all cells so far have led to, in which a row has this label."""
    settle(kernel)
    panel.catch_up()
    return panel.heap(lambda heap: heap["during"] is None and any(row["label"] == label for row in heap["holders"]))


def test_the_heap_is_sent_when_it_has_changed(kernel: Kernel, panel: Panel) -> None:
    kernel.run("kept = torch.zeros(1 << 20)").ok()
    heap = _settled_heap(kernel, panel, "kept")
    kernel.run("a = 1").ok()
    assert _settled_heap(kernel, panel, "kept") == heap
    kernel.run("other = kept; del kept").ok()  # no byte has moved

    after = panel.heap(lambda found: found["heap"] > heap["heap"])

    assert {row["label"] for row in after["holders"]} >= {"other"}
    assert after["cell"] == 5
    panel.until(lambda tick: tick["heap"] == after["heap"])


@pytest.mark.slow
def test_the_heap_is_sent_only_to_who_has_not_got_it(kernel: Kernel, panel: Panel) -> None:
    kernel.run("kept = torch.zeros(1 << 20)").ok()
    heap = _settled_heap(kernel, panel, "kept")

    def sent(**has: Any) -> int:
        before = len(panel.data("heap"))
        panel.tell({"op": "hello", "client": "another", "visible": True, **has})
        panel.catch_up()  # the hub has heard it: of two more ticks the first is followed by what it is sent
        tick = panel.data("tick")[-1]["tick"]
        panel.until(lambda found: found["n"] > tick["n"] + 1)
        return len(panel.data("heap")) - before

    assert sent() == 1
    assert sent(boot=heap["boot"], heap=heap["heap"]) == 0
    assert sent(boot=heap["boot"], heap=heap["heap"] - 1) == 1
    assert sent(boot="earlier", heap=heap["heap"]) == 1


def test_the_picture_is_of_the_end_of_the_cell_and_looks_no_second_time(kernel: Kernel, panel: Panel) -> None:
    looks = "nbguard.memory.scan.scan._scan_without_collecting"
    kernel.run_silently(f"import nbguard.memory.scan.scan; counted = []; real = {looks}")
    panel.heap(lambda heap: heap["heap"] > 0)
    with running(
        kernel,
        "import pathlib\nkept = {'<img src=x>': torch.ones(2**20)}\nwhile not pathlib.Path('gate').exists(): time.sleep(0.01)",
    ) as ended:
        panel.until(lambda tick: tick["busy"])
        rid = panel.ask("picture")
        panel.wait("queued", rid=rid)
        (kernel.cwd / "gate").touch()
        ended().ok()
    picture = panel.wait("picture", rid=rid)["html"]
    number = kernel.value("len(In) - 1")
    assert f"The sidebar as of In[{number}]" in picture
    assert "kept" in picture
    assert "4 MiB" in picture
    assert "<img" not in picture

    kernel.run_silently(f"{looks} = lambda *args: counted.append(1) or real(*args)")
    again = panel.wait("picture", rid=panel.ask("picture"))["html"]
    assert again == picture
    assert kernel.value("counted") == []


def test_the_marks_of_a_picture_add_up_to_its_finding(kernel: Kernel, panel: Panel) -> None:
    """A fit has failed in the middle: its Learner stays, its last batch is stale."""
    kernel.run(f"{SHOWS_SMALL}; learn = learner()").ok()
    kernel.run("class Fails(Callback):\n    def after_pred(self): assert self.iter < 3").ok()
    assert kernel.run("learn.fit(1, cbs=Fails())").error
    panel.heap(lambda heap: heap["stale"] > 0)
    kernel.run("import nbguard; errors = nbguard.report()").ok()

    picture = panel.wait("picture", rid=panel.ask("picture"))["html"]

    (finding,) = re.findall(r"([\d.]+ \w+) is stale", picture)
    assert kernel.value("sum(row.stale_bytes for row in errors.devices[0].holders) == errors.stale")
    assert kernel.value("[row.stale for row in errors.devices[0].holders if row.stale_bytes]") == [False]
    assert f">{finding} stale<" in picture


def test_a_moment_of_the_history_is_shown(kernel: Kernel, panel: Panel) -> None:
    """The simulated device records as a GPU does. What happens later is seen by the next question."""
    panel.wait("refused", rid=panel.ask("moment"))  # nothing is recorded
    for cell in ("%gpumem simulate 64MiB", "%gpumem record on", "gone = torch.empty(4 << 20)", "kept = torch.empty(1 << 20)"):
        kernel.run(cell).ok()
    kernel.run("del gone").ok()

    peak = panel.wait("moment", rid=panel.ask("moment"))["moment"]
    start = panel.wait("moment", rid=panel.ask("moment", device=0, event=0))["moment"]
    end = panel.wait("moment", rid=panel.ask("moment", event=10**6))["moment"]

    assert (peak["event"], peak["devices"], peak["refused"]) == (peak["peak"], [0], None)
    assert [nbytes for _, nbytes in peak["holders"]] == [16 << 20, 4 << 20]
    assert sum(strip["nbytes"] for strip in peak["strips"]) == 36 << 20
    assert max(peak["course"]) == 20 << 20
    assert (start["event"], start["holders"]) == (0, [])
    assert (end["event"], end["holders"]) == (end["events"], [["kept", 4 << 20]])
    panel.wait("refused", rid=panel.ask("moment", device=7))

    kernel.run("more = torch.empty(1 << 20)").ok()
    later = panel.wait("moment", rid=panel.ask("moment", event=10**6))["moment"]
    assert dict(later["holders"]) == {"kept": 4 << 20, "more": 4 << 20}
    assert later["events"] > end["events"]


_LOOP = "for x, y in loader:\n    loss = loss_fn(model(x), y)\n    loss.backward()\n    total += loss"


def test_a_notebooks_cells_are_linted_without_running(plain_kernel: Kernel, plain_panel: Panel) -> None:
    """Without PyTorch and without a scan; lines of IPython's are no obstacle, and a cell that is no Python has no finding."""
    cells = ["import torch\n%matplotlib inline", "def broken(:", "open('ran', 'w')", "total = 0", _LOOP]

    found = plain_panel.wait("lint", rid=plain_panel.ask("lint", cells=cells))["findings"]

    assert [(each["cell"], each["line"], each["code"]) for each in found] == [(4, 4, "NBG101")]
    assert plain_panel.wait("lint", rid=plain_panel.ask("lint", cells=[f"{_LOOP}  # noqa: NBG101"]))["findings"] == []
    assert plain_panel.wait("lint", rid=plain_panel.ask("lint", cells=[]))["findings"] == []
    assert plain_panel.wait("lint", rid=plain_panel.ask("lint", cells=["(" * 5000]))["findings"] == []
    assert not (plain_kernel.cwd / "ran").exists()
    assert plain_kernel.value("'torch' in __import__('sys').modules") is False


@pytest.mark.parametrize("kept", ["a plan", "a queued job", "a heap"])
def test_nothing_of_the_users_is_held(kernel: Kernel, panel: Panel, kept: str) -> None:
    kernel.run("learn = learner(); ref = weakref.ref(learn)").ok()
    wanted = panel.row("learn")
    if kept == "a plan":
        panel.plan("release", **wanted)
    if kept != "a queued job":
        kernel.run("del learn; gc.collect(); gone = ref() is None").ok()
    else:
        with held(kernel, "del learn; gc.collect(); gone = ref() is None"):
            panel.until(lambda tick: tick["busy"])
            panel.wait("queued", rid=panel.ask("apply", token=panel.plan("release", **wanted)["token"]))

    assert kernel.value("gone")


def test_the_next_fit_of_a_learner_is_predicted_and_nothing_of_it_runs(kernel: Kernel, panel: Panel) -> None:
    kernel.run("learn = learner(); before = [p.detach().clone() for p in learn.model.parameters()]").ok()
    wanted = panel.row("learn")

    text = panel.wait("predicted", rid=panel.ask("predict", heap=wanted["heap"], id=wanted["ids"][0]), within=60)["text"]

    need, answer = text.splitlines()
    assert need.startswith("the next fit needs ")
    assert answer == "no GPU was named: `%gpumem predict learn --gpu 16GiB` says whether it fits there"
    assert kernel.value("all(map(torch.equal, before, learn.model.parameters()))")
    assert kernel.value("learn.opt is None")


def test_what_is_no_learner_has_no_next_fit(kernel: Kernel, panel: Panel) -> None:
    kernel.run("first = torch.zeros(1 << 20)").ok()
    wanted = panel.row("first")

    refused = panel.wait("refused", rid=panel.ask("predict", heap=wanted["heap"], id=wanted["ids"][0]))

    assert refused["why"] == "this row has no fit to predict, because it is not a Learner or is training now"
