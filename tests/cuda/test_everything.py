"""`%reset_gpu --all` takes the names that hold memory, and leaves alone what a library brought and what frees nothing."""

from __future__ import annotations

from pathlib import Path

from tests.cuda.conftest import Notebook, counters, reset

MIB = 1 << 20


def _deleted(outcome: dict[str, object]) -> set[str]:
    actions = outcome["plan"]["actions"]  # type: ignore[index]
    return {action["subject"] for action in actions if action["kind"] == "del"}


def test_names_that_a_star_import_of_fastai_brought_stay(notebook: Notebook) -> None:
    """Transforms of fastai's have the loss function that goes with their data, which is a model for nbguard, and no memory."""
    kernel = notebook(fastai=True)
    kernel.run("from fastai.vision.all import *\nbefore = set(globals())").ok()
    kernel.run("""
items = [(torch.full((8,), float(i)), torch.tensor([float(i)])) for i in range(16)]
dls = DataLoaders.from_dsets(items, items, bs=4, device='cuda', num_workers=0)
model = nn.Sequential(nn.Linear(8, 2**18), nn.Linear(2**18, 1))
learn = Learner(dls, model, loss_func=MSELossFlat())
with learn.no_bar(), learn.no_logging(): learn.fit(1)
compiled = torch.compile(model)
""").ok()
    kernel.run("xb, yb = dls.one_batch(); frozen = learn.loss_func").ok()
    assert kernel.run("learn.model(xb.cpu())").error is not None
    start = counters(kernel)[0]

    planned = reset(kernel, "--all --dry-run")
    outcome = reset(kernel, "--all")

    assert kernel.value("before - set(globals())") == set()
    assert kernel.value("[type(each).__name__ for each in (OpenMask, TensorPointCreate, PointBlock)]") == [
        "Transform",
        "Transform",
        "TransformBlock",
    ]
    assert _deleted(outcome) == {"model", "learn", "compiled", "xb", "yb"}
    assert planned["promised"] == outcome["plan"]["promised"] == outcome["realised"] > 10 * MIB
    assert start - counters(kernel)[0] == outcome["realised"] + outcome["extra"]


def test_a_tensor_that_a_library_brought_stays_and_is_not_promised(notebook: Notebook, tmp_path: Path) -> None:
    """Its module keeps it: without the name nothing would come back."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "tables.py").write_text("import torch\nTABLE = torch.zeros(2**18, device='cuda')\n")
    kernel = notebook()
    kernel.run(
        f"import sys; sys.path.insert(0, {str(packages)!r})\nfrom tables import *\nmine = mib(2); both = [TABLE, mib(4)]"
    ).ok()

    outcome = reset(kernel, "--all")

    assert _deleted(outcome) == {"mine", "both"}
    assert outcome["plan"]["promised"] == outcome["realised"] == 6 * MIB
    assert kernel.value("TABLE.shape[0]") == 2**18
    assert counters(kernel)[0] == MIB


def test_names_of_one_object_go_together_and_those_of_a_kept_one_stay(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("net = Net().cuda(); best = net; keep = mib(2); alias = keep; x = mib(1)").ok()

    outcome = reset(kernel, "--all --keep keep")

    assert _deleted(outcome) == {"net", "best", "x"}
    assert outcome["plan"]["promised"] == outcome["realised"]
    assert kernel.value("alias is keep")
    assert counters(kernel)[0] == 2 * MIB


_AT_THE_TOP = """%%profile_fit --all -o report
for step in range(6):
    x, classes = torch.ones(1 << 14, 512, device="cuda"), torch.zeros(1 << 14, dtype=torch.long, device="cuda")
    out = net(x)
    loss = torch.nn.functional.cross_entropy(out, classes)
    total += float(loss)
    loss.backward()
    opt.step()
    opt.zero_grad()
"""


def test_a_loop_whose_names_keep_its_last_batch_is_shown_as_a_function(notebook: Notebook) -> None:
    """The function that is printed is run: it does the same, and its names hold nothing after it."""
    kernel = notebook()
    kernel.run("net = Net().cuda(); opt = torch.optim.Adam(net.parameters()); total = 0.0").ok()
    kernel.run(_AT_THE_TOP).ok()
    [found] = kernel.value("[(f.nbytes, f.what, f.change) for f in report.findings if f.kind == 'loop names']")
    nbytes, what, change = found
    code = change.split("\n", 1)[1]
    held = counters(kernel)[0]

    batch = (1 << 14) * 512 * 4
    assert 2 * batch <= nbytes <= 2 * batch + (1 << 18)
    assert "`out`" in what
    assert "`x`" in what
    kernel.run("del x, classes, out, loss; net.zero_grad()").ok()
    kernel.run(f"%%profile_fit --all -o report\n{code}").ok()
    assert kernel.value("step") == 5
    assert held - counters(kernel)[0] >= 2 * batch
    assert kernel.value("[f.kind for f in report.findings if f.kind == 'loop names']") == []
