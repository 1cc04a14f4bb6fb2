"""`%gpumem simulate` in a real kernel: what the cells that follow do to the simulated device, and that it ends clean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nbguard.memory.allocator.replay.replay import replay
from nbguard.memory.snapshots.load import load_snapshot
from tests.kernel.conftest import held
from tests.kernels import Kernel
from tests.panels import Panel

_MODES = "__import__('torch.utils._python_dispatch').utils._python_dispatch._get_current_dispatch_mode_stack()"


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    kernel.run("import torch").ok()
    kernel.run("%load_ext nbguard").ok()
    return kernel


def test_the_cells_that_follow_say_what_they_did(notebook: Kernel) -> None:
    on = notebook.run("%gpumem simulate 1GiB --context 100MiB --settings expandable_segments:True").ok().text
    assert on.startswith("from the next cell on your code runs on a simulated device of 1 GiB (%gpumem simulate off ends it)")
    assert "settings: expandable_segments:True · CUDA context 100 MiB" in on
    assert on.endswith("4 assumptions (%gpumem simulate --all shows them)")

    made = notebook.run("a = torch.ones(1 << 20)").ok()
    assert made.text == "In[4]  simulated 1 GiB: allocated +4 MiB → 4 MiB · reserved 20 MiB"
    assert notebook.run("x = 1").ok().text == ""
    gone = notebook.run("del a; b = torch.ones(5); del b").ok().text
    assert gone.startswith("In[6]  simulated 1 GiB: allocated −4 MiB → 0 B · reserved 22 MiB")

    assert "assumed: not simulated: workspaces of cuBLAS" in notebook.run("%gpumem simulate --all").ok().text
    off = notebook.run("%gpumem simulate off").ok().text
    assert off.startswith("off: cells run without simulation again. Final state of the simulated device of 1 GiB")
    assert "allocated 0 B (peak 4 MiB)" in off
    assert notebook.run("a = torch.ones(1 << 20)").ok().text == ""
    assert notebook.value(f"len({_MODES})") == 0


_GRAPHS = """
model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1000))
hist = [model(torch.randn(512, 1000)).square().mean() for _ in range(20)]
old = torch.exp(torch.ones(1 << 10, requires_grad=True))
sparse = torch.eye(300).to_sparse()
nested = torch.nested.nested_tensor([torch.ones(500), torch.ones(600)])
"""


def test_looking_adds_nothing_to_the_simulated_device(notebook: Kernel) -> None:
    """To unpack what graphs have saved is an operation of torch's, which the simulation took for one of the cell's."""
    notebook.run(_GRAPHS).ok()
    notebook.run("%gpumem simulate 1GiB").ok()
    assert "→ 32 MiB" in notebook.run("z = [torch.ones(1 << 22) for _ in range(2)]").ok().text

    texts = {}
    for line in ("", " map", " why hist", " why z", " history", " oom", " leak 1 1+1"):
        texts[line] = notebook.run(f"%gpumem{line}", stop_on_error=False).text
    texts["plan"] = notebook.run("%reset_gpu --dry-run hist z").ok().text
    texts["api"] = notebook.run("import nbguard; nbguard.report(); nbguard.why('hist'); nbguard.plan(); _ = 1").ok().text
    texts["notice"] = notebook.run("del z; keep = hist").text

    assert {line: text for line, text in texts.items() if "simulated 1 GiB: allocated" in text and line != "notice"} == {}
    assert "allocated −32 MiB → 0 B" in texts["notice"]


def test_looking_is_seen_by_no_mode_of_the_users(notebook: Kernel) -> None:
    notebook.run(_GRAPHS).ok()
    notebook.run("z = torch.ones(9)").ok()
    notebook.run(
        "import nbguard\nfrom torch.utils._python_dispatch import TorchDispatchMode\nfrom torch.overrides import TorchFunctionMode\n"
        "seen = []\n"
        "class Dispatch(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None): seen.append(func); return func(*args, **(kwargs or {}))\n"
        "class Function(TorchFunctionMode):\n"
        "    def __torch_function__(self, func, types, args=(), kwargs=None): seen.append(func); return func(*args, **(kwargs or {}))\n"
        "with Dispatch() as mode, Function():\n"
        "    report = nbguard.report(); nbguard.why('hist'); nbguard.plan('hist'); nbguard.gpu_map() if hasattr(nbguard, 'gpu_map') else 0\n"
        "    before = list(seen); z + 1"
    ).ok()

    assert notebook.value("list(map(str, before))") == []
    assert notebook.value("len(seen)") == 2


def test_the_sidebar_shows_the_simulated_device_while_a_cell_runs_on_it(notebook: Kernel) -> None:
    notebook.run("%gpumem simulate 1GiB --context 100MiB").ok()
    panel = Panel(notebook)
    panel.hello()
    try:
        with held(notebook, before="a = torch.ones(1 << 20); b = torch.ones(1 << 20); del b"):
            tick = panel.until(lambda tick: tick["busy"] and _parts(tick).get("allocated") == 4 << 20)
            with_it = panel.until(lambda tick: True)
        notebook.run("%gpumem simulate off").ok()
        after = panel.until(lambda tick: tick["tracked"] == "cpu")
    finally:
        panel.stop()

    assert (tick["tracked"], [each["device"] for each in tick["devices"]]) == ("simulated", ["simulated:0"])
    assert tick["devices"][0]["name"].startswith("simulated device")
    assert _parts(tick)["context"] == 100 << 20
    assert sum(_parts(tick).values()) == tick["devices"][0]["total"] == 1 << 30
    assert with_it["devices"][0]["peak"] == 8 << 20
    assert [each["device"] for each in after["devices"]] == ["cpu"]


def _parts(tick: dict[str, Any]) -> dict[str, int]:
    return {part["name"]: part["nbytes"] for device in tick["devices"] for part in device["parts"]}


def test_the_report_shows_the_simulated_device_with_its_holders(notebook: Kernel) -> None:
    before = notebook.run("old = torch.ones(1 << 20)\n%gpumem").ok().text
    assert "simulated" not in before
    notebook.run("%gpumem simulate 2GiB").ok()
    notebook.run("net = torch.nn.Linear(1000, 1000); a = torch.ones(7 << 20)").ok()

    report = json.loads(notebook.run("%gpumem --json").ok().text)
    text = notebook.run("%gpumem").ok().text

    assert not [finding for finding in report["findings"] if finding["kind"] == "outside"]
    assert "○ assumed: 1 CPU tensor of this kernel (4 MiB) is not on the device, because made before" in text
    (device,) = report["devices"]
    assert (report["tracked"], device["device"], device["total"]) == ("simulated", "simulated:0", 2 << 30)
    held = {row["label"]: row["retained"] for row in device["holders"] if row["retained"]}
    assert held == {"a": 28 << 20, "net": 4000256 + 4096}
    assert sum(part["nbytes"] for part in device["parts"]) == 2 << 30
    assert text.startswith("Simulated device: a model of PyTorch's allocator, fed by your code on the CPU\nsimulated:0  ")
    assert "○ assumed: " in text
    notebook.run("%gpumem simulate off").ok()
    assert "simulated" not in notebook.run("%gpumem").ok().text


def test_the_map_shows_the_simulated_device(notebook: Kernel) -> None:
    """What the report recommends: of 80 tensors of 1 MiB every second one is free, and its neighbour keeps it."""
    notebook.run("%gpumem simulate 2GiB").ok()
    notebook.run("xs = [torch.ones(1 << 18) for _ in range(80)]; del xs[::2]").ok()

    drawn = notebook.run("%gpumem map --request 64MiB").ok().text

    assert drawn.startswith("simulated:0")
    assert "xs" in drawn
    assert "a request of 64 MiB succeeds now" in drawn
    assert "stranded 40 MiB" in drawn


def test_a_cleanup_gives_the_simulated_cache_back(notebook: Kernel) -> None:
    notebook.run("%gpumem simulate 2GiB").ok()
    notebook.run("xs = [torch.ones(1 << 22) for _ in range(10)]").ok()
    assert "reserved 160 MiB" in notebook.run("%gpumem map").ok().text

    notebook.run("%reset_gpu --dry-run xs").ok()
    notebook.run("%reset_gpu xs").ok()

    assert "PyTorch has reserved nothing there" in notebook.run("%gpumem map").ok().text


def test_running_out_of_memory_shows_the_card_of_the_simulated_device(notebook: Kernel) -> None:
    notebook.run("%gpumem simulate 200MiB").ok()
    notebook.run("kept = torch.ones(30 << 20)").ok()

    failed = notebook.run("more = torch.ones(25 << 20)")

    assert failed.error is not None
    assert failed.error[0] == "SimulatedCudaOutOfMemoryError"
    assert "it asked simulated:0 for 100 MiB" in failed.text
    assert "kept" in failed.text
    assert "ran out of memory 1×: %gpumem oom" in failed.text
    assert notebook.value(f"len({_MODES})") == 0
    handled = "try:\n    torch.ones(25 << 20)\nexcept torch.OutOfMemoryError:\n    del kept\nmore = torch.ones(25 << 20)"
    after = notebook.run(handled).ok()
    assert "allocated −20 MiB → 100 MiB" in after.text


def test_an_interrupted_and_a_broken_cell_leave_it_clean(notebook: Kernel) -> None:
    notebook.run("%gpumem simulate 1GiB").ok()
    assert notebook.run("t = torch.ones(5); raise KeyboardInterrupt").error is not None
    assert notebook.value(f"len({_MODES})") == 0
    assert notebook.run("t = torch.ones(5); 1 / 0").error is not None
    assert notebook.value(f"len({_MODES})") == 0
    assert notebook.run("t = torch.ones(1000)").ok().text.startswith("In[6]  simulated 1 GiB: allocated +3.5 KiB → 4 KiB")


@pytest.mark.parametrize("end", ["%nbguard off", "%unload_ext nbguard"])
def test_switching_everything_off_ends_it_at_once(notebook: Kernel, end: str) -> None:
    notebook.run("%gpumem simulate 1GiB").ok()
    cell = notebook.run(f"{end}\nprint(len({_MODES}))").ok()

    assert cell.stdout.strip().endswith("0")
    assert notebook.run("t = torch.ones(5)").ok().text == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%gpumem simulate", "nothing is simulated: name a GPU"),
        ("%gpumem simulate off", "nothing is simulated: name a GPU"),
        ("%gpumem simulate much", "no GPU is known as 'much'"),
        ("%gpumem simulate 1GiB --context 3GiB", "leaves no memory"),
        ("%gpumem simulate 1GiB --settings nonsense:1", "nonsense"),
        ("%gpumem simulate --context 3GiB", "need a size"),
    ],
)
def test_bad_input_is_one_clear_line(notebook: Kernel, line: str, message: str) -> None:
    cell = notebook.run(line)
    assert message in (cell.stderr or str(cell.error))
    assert notebook.run("t = torch.ones(5)").ok().text == ""


def test_a_history_is_recorded_saved_and_replayed(notebook: Kernel, tmp_path: Path) -> None:
    """The snapshot of a simulated device has PyTorch's format: another program reads it, and every event is reproduced."""
    file = tmp_path / "simulated.pickle"
    notebook.run("%gpumem simulate 100MiB").ok()
    assert "run  %gpumem record on ," in str(notebook.run("%gpumem whatif").error)
    notebook.run("old = [torch.ones(1 << 18) for _ in range(5)]").ok()
    assert "recording:" in notebook.run("%gpumem record on").ok().text
    notebook.run("keep = [torch.ones(1 << 20) for _ in range(10)]; del keep[::2]").ok()
    notebook.run("net = torch.nn.Linear(1000, 1000); out = net(torch.ones(100, 1000)).sum(); out.backward()").ok()
    assert notebook.run("[torch.ones(1 << 22) for _ in range(9)]").error is not None
    replayed = notebook.run("%gpumem whatif").ok().text
    notebook.run(f"%gpumem snapshot {file}").ok()
    loaded = notebook.run(f"%gpumem load {file}").ok().text

    (done, all_of_them) = map(int, re.search(r"(\d+) of (\d+) events reproduced", replayed).groups())  # type: ignore[union-attr]
    assert done == all_of_them > 30
    assert "out of memory" in replayed
    assert re.search(r"  keep +20 MiB +5 blocks, allocated at In\[\d+\], line 1", loaded)
    snapshot = load_snapshot(file)
    assert snapshot.sidecar.totals == (100 << 20,)
    (result,) = replay(snapshot)
    assert result.reproduced == result.events == all_of_them
    assert result.is_final_equal
    notebook.run("%gpumem record off").ok()
    assert "no history is recorded" in str(notebook.run("%gpumem whatif").error)


def test_a_cell_that_asks_for_a_gpu_is_told_how_to_write_it(notebook: Kernel) -> None:
    if notebook.value("torch.cuda.is_available()"):
        pytest.skip("there is a GPU to take")
    plain = notebook.run("torch.ones(3).cuda()").error
    notebook.run("%gpumem simulate 1GiB").ok()
    failed = notebook.run("torch.ones(3).cuda()")

    assert failed.error == plain  # PyTorch's own error stays as it is; the line stands under it
    assert "device = 'cuda' if torch.cuda.is_available() else 'cpu'  and .to(device) instead of .cuda()" in failed.text
    assert "is_available" not in notebook.run("1 / 0").text


def test_one_card_below_the_cell_in_the_panel_and_by_the_magic(kernel: Kernel, panel: Panel) -> None:
    """The panel's copy has the fixes of the simulated device, and goes with it."""
    kernel.run("%gpumem simulate 96MiB").ok()
    kernel.run("def mib(n): return torch.empty(int(n * 2**20), dtype=torch.uint8)\nkeep = mib(60)").ok()
    shown = kernel.run("x = mib(50)").text
    heap = panel.heap(lambda heap: heap["oom"] is not None)
    card = json.loads(kernel.run("%gpumem oom --json").ok().text)

    assert "enough: the cell gets past the line that failed · 60 MiB · %reset_gpu keep" in shown
    fixes = [(fix["commands"], fix["nbytes"]) for fix in card["fixes"]]
    assert [(fix["commands"], fix["nbytes"]) for fix in heap["oom"]["fixes"]] == fixes
    assert (["%reset_gpu keep"], 60 * 2**20) in fixes
    kernel.run("%gpumem simulate off").ok()
    panel.heap(lambda heap: heap["oom"] is None)


@pytest.mark.slow
def test_what_grows_and_what_keeps_graphs_for_nobody(notebook: Kernel) -> None:
    """A smaller batch is no remedy for a list of outputs, nor accumulation where nothing calls backward.

    The advice stays after a cleanup has freed the list, or the graph.
    """
    notebook.run(
        "from torch import nn\nnet = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024)); data = torch.randn(4096, 256)\n"
        "def evaluate(net, data):\n    preds = []\n    for i in range(0, 4096, 512): preds.append(net(data[i:i+512].repeat(4, 1)))\n"
    ).ok()
    notebook.run("%gpumem simulate 128MiB").ok()
    cells = {
        "evaluate(net, data)": ("evaluate → preds grows: ", "torch.no_grad()"),
        "for i in range(0, 4096, 512): out = net(data[i:i+512].repeat(12, 1))": ("torch.no_grad()",),
        "hist = []\nfor i in range(40):\n    loss = net(data[:512]).square(); loss.mean().backward(retain_graph=True); hist.append(loss)": (
            "hist grows: ",
            "append loss.item() or t.detach()",
        ),
    }
    for code, expected in cells.items():
        assert notebook.run(code).error is not None
        for line in ("pass", "%reset_gpu", "out = loss = hist = None"):
            notebook.run(line).ok()
            fixes = json.loads(notebook.run("%gpumem oom --json").ok().text)["fixes"]
            words = " | ".join(fix["words"] for fix in fixes)
            assert all(part in words for part in expected), (line, words)
            assert "accumulation" not in words
            assert "a smaller batch" not in words
            assert not [fix for fix in fixes if fix["enough"]], "the rest of the loop is not known"


_BIG = """
def mib(n): return torch.empty(int(n * 2**20), dtype=torch.uint8)
def comb(count, size=64, live=16):
    whole = [mib(size) for _ in range(count)]; del whole
    return [mib(live) for _ in range(count * size // live)][:: size // live]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(20)))
    def forward(self, x): return self.layers(x)
"""


def test_room_is_made_by_the_command_on_the_card(notebook: Kernel) -> None:
    notebook.run(_BIG).ok()
    notebook.run("%gpumem simulate 1GiB").ok()
    notebook.run("teeth = comb(15); places = [t.data_ptr() for t in teeth]").ok()
    assert notebook.run("x = mib(300)").error is not None
    card = json.loads(notebook.run("%gpumem oom --json").ok().text)
    (fix,) = [fix for fix in card["fixes"] if any("make-room" in line for line in fix["commands"])]

    assert json.loads(notebook.run(f"{fix['commands'][-1]} --dry-run --json").ok().text)["state"] == "planned"
    made = notebook.run(fix["commands"][-1]).ok().text

    assert "fits on simulated:0 now" in made
    assert "teeth[" in made
    notebook.run("x = mib(300)").ok()
    assert notebook.value("[t.data_ptr() for t in teeth] == places")
    failed = notebook.run("%gpumem make-room 3MiB --device 7")
    assert failed.error is not None
    assert "no device" in failed.error[1]


def test_a_cell_that_does_not_fit_goes_on_in_the_airbag(notebook: Kernel) -> None:
    notebook.run(_BIG).ok()
    notebook.run("%gpumem simulate 1GiB").ok()
    assert notebook.run("big = [mib(90) for _ in range(13)]").error is not None
    card = json.loads(notebook.run("%gpumem oom --json").ok().text)
    assert "simulated:0" in notebook.run(card["airbag"]["command"]).ok().text

    told = notebook.run("big = [mib(90) for _ in range(13)]").ok().text
    assert "did not fit simulated:0 and lay in host memory" in told
    assert "`big`" in told
    assert re.match(r"In\[8\]  simulated 1 GiB", told.splitlines()[-1]), told
    (device,) = json.loads(notebook.run("%gpumem --json").ok().text)["devices"]
    assert {part["name"]: part["nbytes"] for part in device["parts"]}["spilled"] == 180 << 20
    back = notebook.run("del big[:4]").ok().text
    assert "180 MiB moved from host memory to simulated:0" in back
    assert notebook.run("y = 1").ok().text == ""
    notebook.run("big = [mib(90) for _ in range(13)]").ok()
    notebook.run("%gpumem simulate off").ok()
    assert "the airbag is off" in notebook.run("%gpumem airbag").ok().text


def test_models_take_turns_and_what_waits_frees_the_device(notebook: Kernel) -> None:
    notebook.run(_BIG).ok()
    notebook.run("%gpumem simulate 1GiB").ok()
    notebook.run("%gpumem budget 200MiB").ok()
    texts = [notebook.run(f"{name} = Net()").ok().text for name in "abc"]
    assert "`a` parked" in texts[2]
    assert "allocated 0 B" in texts[2] or "→ 160" in texts[2]

    told = notebook.run("y = a(torch.zeros(2, 1024))").ok().text

    assert re.search(r"In\[9\]: `a` is back, `b` parked", told), told
    state = json.loads(notebook.run("%gpumem budget --json").ok().text)
    assert (state["device"], [model["name"] for model in state["models"] if model["parked"]]) == ("simulated:0", ["b"])
    notebook.run("%gpumem simulate off").ok()
    for line in ("%gpumem budget", "%gpumem budget off"):
        assert "no budget is set, so models stay where they are; %gpumem budget 14GiB lets" in notebook.run(line).ok().text
    notebook.run("y = b(torch.zeros(2, 1024))").ok()


_SURVIVES = """
torch.manual_seed(0)
def weights(survives):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 256))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4096, 256)
    with (nbguard.survive(net, opt) if survives else contextlib.nullcontext()) as survived:
        for _ in range(3):
            net(x).square().mean().backward(); opt.step(); opt.zero_grad()
    said.append(str(survived.changes) if survives else "")
    return [p.detach().clone() for p in net.parameters()]
import contextlib, nbguard
said = []
plain = weights(False)
"""


@pytest.mark.slow
def test_a_fit_that_runs_out_goes_on_with_the_same_weights(notebook: Kernel) -> None:
    notebook.run(_SURVIVES).ok()
    notebook.run("%gpumem simulate 160MiB").ok()
    assert notebook.run("weights(False)").error is not None
    notebook.run("%reset_gpu").ok()

    notebook.run("got = weights(True)").ok()

    assert "pieces" in str(notebook.value("said"))
    assert notebook.value("max(float((a - b).abs().max()) for a, b in zip(plain, got))") < 1e-6
