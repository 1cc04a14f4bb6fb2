"""Running out of the host's memory in a real kernel: PyTorch's, NumPy's and Python's own failures, limits, killed workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernels import Kernel

GIB = 1024**3


def _card(kernel: Kernel) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kernel.run("%gpumem oom --json").ok().text)
    return found


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    kernel.run("import torch, numpy as np").ok()
    kernel.run("%load_ext nbguard").ok()
    return kernel


@pytest.mark.parametrize(
    ("cell", "error", "requested"),
    [
        ("x = torch.empty(2**46)", "RuntimeError", 2**48),
        ("x = torch.empty(10).resize_(2**44)", "RuntimeError", 2**46),
        ("x = np.zeros(2**46)", "MemoryError", 2**49),
        ("x = bytearray(2**50)", "MemoryError", None),
        ("try: torch.empty(2**46)\nexcept RuntimeError as e: raise ValueError('x') from e", "ValueError", 2**48),
    ],
)
def test_an_absurd_request(notebook: Kernel, cell: str, error: str, requested: int | None) -> None:
    failed = notebook.run(cell)
    assert failed.error is not None
    assert failed.error[0] == error

    card = _card(notebook)
    text = notebook.run("%gpumem oom").ok().text

    asked = card["asked"]
    assert (asked["kind"], asked["device"], asked["requested"]) == ("host", "cpu", requested)
    assert error in (asked["error"], asked["shown"])
    assert asked["line"]["text"] in cell
    assert asked["host"]["available"] < asked["host"]["total"]
    assert not [fix for fix in card["fixes"] if fix["enough"]]
    assert "the request exceeds the whole machine's memory" in text or requested is None
    assert "it asked the host for" in text


def test_a_limit_on_the_address_space_and_the_stale_learner_that_fills_it(notebook: Kernel) -> None:
    """The card says that a cleanup is enough, and then it is."""
    notebook.run(
        "import resource\nfrom fastai.basics import *\n"
        "class Big(nn.Module):\n    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.empty(2**30), False)\n"
        "learn = Learner(DataLoaders([], []), Big(), loss_func=1, opt_func=1)\nlearn"
    ).ok()
    notebook.run("learn = None; used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()").ok()
    notebook.run("resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, -1)); ask = 3 * 2**30").ok()
    failed = notebook.run("x = torch.empty(ask, dtype=torch.uint8)")
    assert failed.error is not None
    assert "3221225472 bytes" in failed.error[1]

    card = _card(notebook)

    host, best = card["asked"]["host"], card["fixes"][0]
    assert card["had"] == min(host["address_room"], host["available"], host["group_room"] or host["available"])
    assert host["address_room"] < 3 * GIB
    if host["available"] < 4 * GIB:
        pytest.skip("this machine has too little memory free for the rest of the test")
    assert (best["commands"], best["nbytes"] // GIB, best["enough"]) == (["%reset_gpu"], 4, True)
    notebook.run("%reset_gpu").ok()
    notebook.run("x = torch.empty(ask, dtype=torch.uint8)").ok()


def test_a_worker_that_the_system_killed(notebook: Kernel) -> None:
    # A class of a notebook's is known to a worker that is forked only, which since Python 3.14 must be asked for.
    notebook.run(
        "import os, signal\n"
        "class Greedy(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)\n"
    ).ok()
    failed = notebook.run(
        "for batch in torch.utils.data.DataLoader(Greedy(), num_workers=1, multiprocessing_context='fork'): pass"
    )
    assert failed.error is not None, "it says that the worker exited; that it was killed stands in the error before that"

    card = _card(notebook)
    text = notebook.run("%gpumem oom").ok().text

    assert card["asked"]["kind"] == "worker"
    assert "a DataLoader worker was killed" in text
    assert "shared memory" in text
    assert "num_workers=0" in card["fixes"][-1]["words"]


def test_shared_memory_that_is_full(notebook: Kernel) -> None:
    failed = notebook.run("raise RuntimeError('unable to write to file </torch_1_2_0>: No space left on device (28)')")
    assert failed.error is not None

    card = _card(notebook)

    assert card["asked"]["kind"] == "shm"
    assert card["asked"]["host"]["shm_total"] is not None


_SHOWN_INSIDE = (
    "%%capture\nf()",
    "%run fails.py",
    "get_ipython().run_cell('f()');",
    "class Shown:\n    def __repr__(self): f()\nShown()",
)


def test_an_error_that_ends_inside_the_cell_is_one_of_the_cell(notebook: Kernel) -> None:
    """IPython takes such a cell for a success: the error has been shown by the magic, or by what displays the result."""
    notebook.run("%nbguard on --auto-clean-errors").ok()
    notebook.run("def f():\n    keep = torch.ones(2**20)\n    return torch.empty(2**46)").ok()
    (notebook.cwd / "fails.py").write_text("import torch\ndef g(keep): torch.empty(2**46)\ng(torch.ones(2**20))\n")
    for cell in _SHOWN_INSIDE:
        texts = [bundle["text/plain"] for bundle in notebook.run(cell, stop_on_error=False).bundles]
        assert [text for text in texts if "it asked the host for 256 TiB" in text], cell
        assert [text for text in texts if text.startswith("released 4 MiB")], cell
        assert notebook.run("1 + 1;").bundles == []
    assert notebook.run("try: f()\nexcept RuntimeError: pass").bundles == []


def test_the_plain_report_says_it_in_one_sentence(notebook: Kernel) -> None:
    notebook.run("x = torch.empty(2**46)")

    text = notebook.run("%gpumem").ok().text

    assert "the last error ran out of memory: it asked the host for 256 TiB; a smaller array or batch asks" in text
    notebook.run("1/0")
    assert "ran out of memory" not in notebook.run("%gpumem").ok().text


def test_once_the_cell_has_run_through_nothing_is_said_of_its_error(notebook: Kernel) -> None:
    notebook.run("%gpumem simulate 1GiB").ok()
    notebook.run("kept = torch.empty(150 * 2**20)").ok()
    assert notebook.run("x = torch.empty(150 * 2**20)").error is not None
    assert "oom" in _findings(notebook)

    notebook.run("del kept").ok()
    assert "oom" in _findings(notebook), "another cell cures nothing that it was not seen to cure"
    notebook.run("x = torch.empty(150 * 2**20)").ok()

    assert "oom" not in _findings(notebook)
    assert "has run through since" in notebook.run("%gpumem oom").ok().text


def test_once_its_memory_is_free_and_another_cell_got_some_nothing_is_said_of_the_error(notebook: Kernel) -> None:
    """A notebook went on with something else: each report began with the old error, to the session's end."""
    notebook.run("%gpumem simulate 1GiB").ok()
    notebook.run("def step():\n    kept = torch.empty(150 * 2**20)\n    return torch.empty(150 * 2**20)").ok()
    assert notebook.run("step()").error is not None
    notebook.run("small = torch.ones(2**20)").ok()
    assert "oom" in _findings(notebook), "the error still holds memory"

    notebook.run("%reset_gpu").ok()
    assert "oom" not in _findings(notebook)
    assert "it asked" in notebook.run("%gpumem oom").ok().text, "who asks is told"

    assert notebook.run("step()").error is not None
    notebook.run("%reset_gpu").ok()
    notebook.run("n = 3").ok()
    assert "oom" in _findings(notebook), "nothing has got memory since"
    notebook.run("other = torch.ones(2**20)").ok()
    assert "oom" not in _findings(notebook)


def _findings(kernel: Kernel) -> set[str]:
    found = json.loads(kernel.run("%gpumem --json").ok().text)["findings"]
    return {each["kind"] for each in found}


def test_from_a_script(notebook: Kernel) -> None:
    code = "import nbguard\ntry: torch.empty(2**46)\nexcept RuntimeError: card = nbguard.oom(globals())\nnone = nbguard.oom(globals())"
    notebook.run(code).ok()

    assert notebook.value("card.asked.requested, card.asked.line.number, none") == (2**48, 2, None)


def test_the_card_keeps_nothing_alive(notebook: Kernel) -> None:
    notebook.run(
        "import weakref, nbguard\nclass Held: pass\ndef f(h): torch.empty(2**46)\nh = Held(); ref = weakref.ref(h)"
    ).ok()
    notebook.run("f(h)")
    notebook.run("card = %gpumem oom").ok()
    notebook.run("del h")
    notebook.run("1/0")
    notebook.run("import gc; gc.collect()").ok()

    assert notebook.value("ref() is None, card.asked.requested") == (True, 2**48)
