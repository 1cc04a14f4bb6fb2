"""Running out of memory on the device: the card's figures are torch's own, and what it says lets a run through does so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda.conftest import Notebook
from tests.kernels import Cell, Kernel

MIB = 1024**2
ATTACH = """
from nbguard.memory.cleanup.apply.oom_observer import attach, detach
from nbguard.memory.scan.oom.chain import NOTES, ran_out
assert attach() and attach()
"""


def _card(kernel: Kernel) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kernel.run("%gpumem oom --json").ok().text)
    return found


def _fails(cell: Cell, error: str = "OutOfMemoryError") -> None:
    assert cell.error is not None
    assert cell.error[0] == error, cell.error


def _start(notebook: Notebook, attach: bool = True, hook: bool = False, **settings: object) -> Kernel:
    """Return a kernel on a device of 1024 MiB, 100 of them the context's; with `hook`, what is there before a cell is noted."""
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB, **settings)
    if hook:
        return kernel
    kernel.run_silently("get_ipython().run_line_magic('nbguard', 'off')")  # else the hook attaches it before each cell
    if attach:
        kernel.run(ATTACH).ok()
    return kernel


def _commands(card: dict[str, Any]) -> list[list[str]]:
    return [fix["commands"] for fix in card["fixes"]]


def _run(kernel: Kernel, fix: dict[str, Any]) -> None:
    for command in fix["commands"]:
        kernel.run(command).ok()


@pytest.mark.parametrize("attach", [True, False])
def test_a_plain_cell(notebook: Notebook, attach: bool) -> None:
    """What the run had taken comes back with a cleanup, for a smaller run: the same one would run out again."""
    kernel = _start(notebook, attach)
    _fails(kernel.run("def step(batch):\n    hidden = mib(500)\n    return mib(400)\nstep(mib(300))"))

    card = _card(kernel)

    asked = card["asked"]
    assert (asked["device"], asked["requested"], asked["slack"], asked["error"]) == ("cuda:0", 400 * MIB, 0, "OutOfMemoryError")
    note = asked["note"]
    assert (note["cell"], note["time"] is None) == ((asked["cell"], False) if attach else (None, True))
    assert (note["allocated"], note["free"], note["reserved"]) == (800 * MIB, 124 * MIB, 800 * MIB)
    assert asked["line"]["text"].startswith("def mib(n")
    assert (card["taken"], card["had"]) == (800 * MIB, 124 * MIB)
    smaller, best = card["fixes"][:2]
    assert smaller["words"].startswith("a smaller tensor"), "the cell took most of the device, and no model ran"
    assert (best["commands"], best["nbytes"], best["enough"]) == (["%reset_gpu"], 800 * MIB, False)
    _run(kernel, best)
    assert _card(kernel)["had"] == 924 * MIB
    kernel.run("fits = [mib(200), mib(300), mib(300)]").ok()
    kernel.run("del fits").ok()
    _fails(kernel.run("step(mib(300))"))


def test_the_observers_numbers_are_exact(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run("keep = [mib(30) for _ in range(3)]; del keep[1]; before = torch.cuda.mem_get_info()").ok()
    _fails(kernel.run("x = mib(901)"))

    note = _card(kernel)["asked"]["note"]

    assert note["requested"] == 902 * MIB, "torch asks for whole segments of 2 MiB"
    assert (note["total"], note["limit"]) == (1024 * MIB, None)
    assert (note["allocated"], note["reserved"], note["free"]) == (60 * MIB, 60 * MIB, 864 * MIB)
    assert (note["peak_allocated"], note["stranded"], note["largest_free"]) == (90 * MIB, 0, 0)
    assert note["unread"] == ""


def test_numbers_of_a_cache_in_pieces(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run("small = [mib(4) for _ in range(10)]; del small[::2]").ok()
    reserved = kernel.value("torch.cuda.memory_reserved()")
    _fails(kernel.run("x = mib(1000)"))

    note = _card(kernel)["asked"]["note"]

    assert (note["allocated"], note["stranded"]) == (20 * MIB, reserved - 20 * MIB)
    assert note["largest_free"] >= 4 * MIB


def test_stale_memory_of_others_than_the_run_is_enough(notebook: Notebook) -> None:
    kernel = _start(notebook, fastai=True)
    kernel.run("class Big(nn.Module):\n    def __init__(self): super().__init__(); self.w = nn.Parameter(mib(500), False)").ok()
    kernel.run("from fastai.basics import *\nlearn = Learner(DataLoaders([], []), Big(), loss_func=1, opt_func=1)\nlearn").ok()
    kernel.run("learn = None").ok()
    _fails(kernel.run("x = mib(600)"))

    card = _card(kernel)
    text = kernel.run("%gpumem").ok().text

    best = card["fixes"][0]
    assert (best["commands"], best["enough"]) == (["%reset_gpu"], True)
    assert "ran out of memory: it asked cuda:0 for 600 MiB; %reset_gpu frees stale memory; 924 MiB can be allocated" in text
    _run(kernel, best)
    kernel.run("x = mib(600)").ok()


def test_after_two_errors_a_row_has_its_own_bytes_alone_and_the_cleanup_comes_before_a_name(notebook: Notebook) -> None:
    """The frames of both errors have `old`: its row had their memory, too, and the card freed it before it cleaned up."""
    kernel = _start(notebook, hook=True)
    kernel.run("def step(x):\n    keep = [x, mib(200)]\n    return mib(700)\ndata, old = mib(150), mib(200)").ok()
    kernel.run("import gc; gc.disable()").ok()  # an earlier error waits for the collector
    _fails(kernel.run("step(old)"))
    _fails(kernel.run("mib(600)"))

    best = _card(kernel)["fixes"][0]
    (device,) = json.loads(kernel.run("%gpumem --json").ok().text)["devices"]

    assert {row["label"]: row["retained"] // MIB for row in device["holders"]} == {
        "unreachable cycles": 200,
        "old": 200,
        "data": 150,
    }
    assert (best["commands"], best["nbytes"], best["enough"]) == (["%reset_gpu", "%reset_gpu data"], 350 * MIB, True)
    allocated = kernel.value("torch.cuda.memory_allocated()")
    _run(kernel, best)
    assert allocated - kernel.value("torch.cuda.memory_allocated()") == 350 * MIB
    kernel.run("x = mib(600)").ok()


@pytest.mark.parametrize(
    ("cell", "verdict", "enough"),
    [
        ("x = [net.numel(), mib(300)]", "rerun", True),
        ("x = [mib(300), net.numel()]", "further", None),  # it calls something after the request that failed
    ],
)
def test_the_name_that_is_said_to_be_enough_is(notebook: Notebook, cell: str, verdict: str, enough: bool | None) -> None:
    """Not b and c, which are too small together, nor net, which the cell needs."""
    kernel = _start(notebook)
    kernel.run("a, b, c, net = mib(500), mib(150), mib(50), mib(100)").ok()
    _fails(kernel.run(cell))

    fixes = [fix for fix in _card(kernel)["fixes"] if fix["verdict"] == verdict]

    assert [(fix["commands"], fix["nbytes"]) for fix in fixes] == [
        (["%reset_gpu a"], 500 * MIB),
    ], "net is needed, b is too small"
    assert fixes[0]["enough"] is enough
    _run(kernel, fixes[0])
    kernel.run(cell).ok()


def test_two_names_that_are_said_to_be_enough_are(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run("a, b, c = mib(300), mib(250), mib(300)").ok()
    _fails(kernel.run("x = mib(600)"))

    best, parking = _card(kernel)["fixes"][:2]

    assert parking["commands"] == ["%reset_gpu --park a c"]
    assert (best["commands"], best["nbytes"], best["enough"]) == (["%reset_gpu a b"], 550 * MIB, True)
    _run(kernel, best)
    kernel.run("x = mib(600)").ok()


def test_the_old_value_of_the_name_that_the_line_binds(notebook: Notebook) -> None:
    """`x = f()` a second time: the first x is there while f runs."""
    kernel = _start(notebook, hook=True)
    kernel.run("x = mib(600)").ok()
    _fails(kernel.run("x = mib(600)"))

    best = _card(kernel)["fixes"][0]

    assert (best["commands"], best["enough"]) == (["%reset_gpu x"], True)
    _run(kernel, best)
    kernel.run("x = mib(600)").ok()


def test_what_the_cell_itself_has_piled_up_is_no_fix(notebook: Notebook) -> None:
    kernel = _start(notebook)
    _fails(kernel.run("pile = []\nwhile True:\n    pile.append(mib(100))"))

    card = _card(kernel)

    assert card["taken"] == 900 * MIB
    assert not [fix for fix in card["fixes"] if fix["enough"]]


def test_fragmentation(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run("whole = mib(900); del whole").ok()
    kernel.run("xs = [mib(90) for _ in range(10)]; del xs[::2]").ok()
    _fails(kernel.run("y = [mib(450), xs]"))

    fix = next(fix for fix in _card(kernel)["fixes"] if fix["words"].startswith("fragmentation"))

    assert "474 MiB was free in all, 450 MiB of it in pieces" in fix["words"]
    assert (fix["commands"], fix["nbytes"]) == (["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"], 5 * 60 * MIB)


def test_the_setting_against_fragmentation_keeps_its_word(notebook: Notebook) -> None:
    pieces = "whole = mib(900); del whole; xs = [mib(90) for _ in range(10)]; del xs[::2]"
    ask = "y = [mib(320), xs]"
    kernel = _start(notebook)
    kernel.run(pieces).ok()
    _fails(kernel.run(ask))
    fix = next(fix for fix in _card(kernel)["fixes"] if fix["words"].startswith("fragmentation"))
    assert fix["enough"] is None

    other = _start(notebook, conf=fix["commands"][0].partition("=")[2])
    other.run(pieces).ok()
    other.run(ask).ok()

    _fails(other.run("z = mib(600)"))
    assert not [fix for fix in _card(other)["fixes"] if "fragmentation" in fix["words"]], "it is on already"


@pytest.mark.parametrize("attach", [True, False])
def test_a_memory_fraction(notebook: Notebook, attach: bool) -> None:
    kernel = _start(notebook, attach, hook=attach)
    kernel.run("torch.cuda.set_per_process_memory_fraction(0.5); net = mib(200)").ok()
    _fails(kernel.run("x = [mib(400), net]"))

    card = _card(kernel)

    assert (card["limit"], card["had"], card["asked"]["limit"]) == (512 * MIB, 312 * MIB, 512 * MIB)
    best = card["fixes"][0] if attach else next(fix for fix in card["fixes"] if "limit" in fix["words"])
    assert (best["nbytes"], best["verdict"]) == (724 * MIB - 312 * MIB, "rerun" if attach else "request")
    _run(kernel, best)
    kernel.run("x = [mib(400), net]").ok()


def test_other_processes(notebook: Notebook, tmp_path: Any) -> None:
    kernel = _start(notebook, state=str(tmp_path / "device"))
    other = notebook(context=0, state=str(tmp_path / "device"))
    other.run("x = mib(500)").ok()
    _fails(kernel.run("y = mib(700)"))

    (best,) = [fix for fix in _card(kernel)["fixes"] if fix["enough"]]

    assert (best["nbytes"], best["enough"], best["commands"]) == (500 * MIB, True, [])
    assert f"pid {other.pid}" in best["words"]
    other.stop()
    kernel.run("y = mib(700)").ok()


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("try:\n    mib(1000)\nexcept torch.OutOfMemoryError as error:\n    raise ValueError('no') from error", "ValueError"),
        ("try:\n    mib(1000)\nexcept torch.OutOfMemoryError:\n    {}['key']", "KeyError"),
        ("try:\n    raise KeyError\nexcept KeyError:\n    mib(1000)", ""),
        ("try: mib(1000)\nexcept torch.OutOfMemoryError as e: raise RuntimeError(str(e)) from None", "RuntimeError"),
    ],
)
def test_another_error_on_top(notebook: Notebook, cell: str, shown: str) -> None:
    kernel = _start(notebook)
    _fails(kernel.run(cell), shown or "OutOfMemoryError")

    asked = _card(kernel)["asked"]

    assert (asked["requested"], asked["device"]) == (1000 * MIB, "cuda:0")
    assert asked["note"]["time"] is not None
    assert shown in (asked["shown"], asked["error"])


def test_an_older_note_is_not_taken_for_this_failure(notebook: Notebook) -> None:
    kernel = _start(notebook)
    _fails(kernel.run("x = mib(1000)"))
    kernel.run("detach(); torch.cuda.memory_allocated()").ok()
    _fails(kernel.run("x = mib(1000)"))
    assert _card(kernel)["asked"]["note"]["time"] is None
    kernel.run("attach(); keep = mib(10)").ok()
    _fails(kernel.run("x = mib(1000)"))
    kernel.run("detach.__globals__['_OBSERVER'].is_on = False").ok()
    kernel.run("del keep; torch.cuda.empty_cache()").ok()

    _fails(kernel.run("x = mib(1000)"))

    assert _card(kernel)["asked"]["note"]["time"] is None, "the note there is was made with 10 MiB more in use"


def test_a_caught_failure_after_the_shown_one_does_not_hide_its_note(notebook: Notebook) -> None:
    kernel = _start(notebook)
    _fails(kernel.run("x = mib(1000)"))
    kernel.run("try: mib(990)\nexcept torch.OutOfMemoryError: pass").ok()

    note = _card(kernel)["asked"]["note"]
    assert (note["requested"], note["time"] is None) == (1000 * MIB, False)


def test_the_last_error_is_of_another_kind(notebook: Notebook) -> None:
    kernel = _start(notebook)
    first = kernel.run("%gpumem oom").ok().text
    _fails(kernel.run("1/0"), "ZeroDivisionError")

    assert kernel.run("%gpumem oom").ok().text == first
    assert "out of memory" in first
    assert kernel.value("__import__('nbguard').oom()") is None
    _fails(kernel.run("%gpumem oom x"), "UsageError")


def test_the_error_being_handled(notebook: Notebook) -> None:
    kernel = _start(notebook)
    code = (
        "import nbguard\ntry: mib(1000)\nexcept torch.OutOfMemoryError as error: card = nbguard.oom(); found = ran_out(error)"
    )
    kernel.run(code).ok()

    assert kernel.value("card.asked.requested, found") == (1000 * MIB, True)


def test_a_backward_pass_in_its_own_thread(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run(
        "class F(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x.clone()\n"
        "    @staticmethod\n    def backward(ctx, g): return mib(1000)\n"
        "x = torch.ones(3, device='cuda', requires_grad=True)"
    ).ok()
    _fails(kernel.run("F.apply(x).sum().backward()"))

    asked = _card(kernel)["asked"]

    assert (asked["requested"], asked["note"]["time"] is None) == (1000 * MIB, False)


@pytest.mark.slow
def test_a_fit_that_was_too_large(notebook: Notebook) -> None:
    """The card names the batch that gets as far, and that one does."""
    kernel = _start(notebook, fastai=True)
    kernel.run(
        """
from fastai.basics import *
class Grow(nn.Module):
    def __init__(self): super().__init__(); self.body = nn.Linear(4, 4)
    def forward(self, x):
        kept = []
        for _ in range(6): kept.append(mib(4 * len(x)))
        return self.body(x)
def loaders(bs): return DataLoaders(*[DataLoader([(torch.ones(4), torch.ones(4))] * 128, bs=bs) for _ in '12'], device='cuda')
learn = Learner(loaders(64), Grow(), loss_func=nn.MSELoss(), cbs=[])
"""
    ).ok()
    _fails(kernel.run("with learn.no_bar(): learn.fit(1)"))

    card = _card(kernel)

    (fix,) = [fix for fix in card["fixes"] if "batch of" in fix["words"]]
    assert card["asked"]["batch_size"] == 64
    assert "a batch of 32 instead of 64" in fix["words"]
    assert card["taken"] >= 3 * 256 * MIB
    _run(kernel, fix)
    kernel.run("learn.dls = loaders(32)\nwith learn.no_bar(): learn.fit(1)").ok()


def test_the_observer_keeps_nothing_alive_and_disturbs_nothing(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run("import weakref, gc; x = mib(300); ref = weakref.ref(x)").ok()
    kernel.run("try: mib(1000)\nexcept torch.OutOfMemoryError: pass\ndel x; gone = ref() is None").ok()

    assert kernel.value("gone, torch.cuda.memory_allocated()") == (True, 0)
    kernel.run("len(NOTES)").ok()
    kernel.run("for _ in range(20):\n    try: mib(1000)\n    except torch.OutOfMemoryError: pass").ok()
    assert kernel.value("len(NOTES)") == 8
    kernel.run("detach(); n = len(NOTES)\ntry: mib(1000)\nexcept torch.OutOfMemoryError: pass").ok()
    assert kernel.value("n, len(NOTES)") == (0, 0)


def test_a_mistake_in_the_observer_does_not_reach_the_user(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run("watch = attach.__globals__; real = watch['_note']\ndef broken(*a): raise OSError\nwatch['_note'] = broken").ok()
    _fails(kernel.run("mib(1000)"))
    kernel.run("def again(*a): mib(2000)\nwatch['_note'] = again").ok()
    _fails(kernel.run("mib(1000)"))
    assert "Tried to allocate 1000.00 MiB" in (kernel.run("mib(1000)").error or ("", ""))[1]
    kernel.run("def interrupted(*a): raise KeyboardInterrupt\nwatch['_note'] = interrupted").ok()
    _fails(kernel.run("mib(1000)"), "KeyboardInterrupt")
    kernel.run("watch['_note'] = real").ok()
    _fails(kernel.run("mib(1000)"))
    assert kernel.value("len(watch['NOTES']), watch['_OBSERVER'].inside") == (1, set())


def test_attaching_opens_no_context(notebook: Notebook) -> None:
    kernel = _start(notebook)

    assert kernel.value("torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0)") == (False, False)
    kernel.run("torch.cuda.init()").ok()
    assert kernel.value("torch._C._cuda_hasPrimaryContext(0)") is False
    _fails(kernel.run("mib(1000)"))
    assert kernel.value("len(NOTES)") == 1


def test_a_library_that_ran_out(notebook: Notebook) -> None:
    kernel = _start(notebook)
    kernel.run("x = mib(300); y = mib(200); del x").ok()
    _fails(
        kernel.run("raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')"),
        "RuntimeError",
    )

    card = _card(kernel)

    assert (card["asked"]["kind"], card["asked"]["requested"]) == ("library", None)
    fix = card["fixes"][0]
    assert (fix["commands"], fix["nbytes"], fix["enough"]) == (["%reset_gpu"], 300 * MIB, None)
    _run(kernel, fix)
    assert kernel.value("torch.cuda.memory_reserved()") == 200 * MIB


def test_the_card_is_shown_as_text_and_html_and_leaves_debug_alone(notebook: Notebook) -> None:
    kernel = _start(notebook)
    _fails(kernel.run("def step(batch):\n    hidden = mib(500)\n    return mib(600)\nstep(mib(300))"))

    bundle = kernel.run("%gpumem oom").ok().bundles[0]

    assert "it asked cuda:0 for 600 MiB" in bundle["text/plain"]
    assert "it asked cuda:0 for 600 MiB" in bundle["text/html"]
    assert "OutOfMemoryError" in bundle["text/html"]
    debugged = kernel.run("%debug", inputs=["up", "p hidden.numel()", "q"])
    assert str(500 * MIB) in debugged.stdout


def test_the_second_of_two_devices(notebook: Notebook) -> None:
    kernel = _start(notebook, devices=2)
    kernel.run("first, second, third = mib(700), mib(600, 'cuda:1'), mib(200, 'cuda:1')").ok()
    _fails(kernel.run("x = mib(700, 'cuda:1')"))

    card = _card(kernel)

    assert (card["device"], card["held"], card["asked"]["note"]["allocated"]) == ("cuda:1", 800 * MIB, 800 * MIB)
    best, parking = card["fixes"][:2]
    assert (parking["commands"], parking["nbytes"]) == (["%reset_gpu --park second"], 600 * MIB)
    assert (best["commands"], best["nbytes"], best["enough"]) == (["%reset_gpu second"], 600 * MIB, True)
    _run(kernel, best)
    kernel.run("x = mib(700, 'cuda:1')").ok()


def test_a_name_that_was_made_since_is_no_leftover(notebook: Notebook) -> None:
    """What the failed run left under a name can go, as its next run makes it anew; what a later cell put there is yours."""
    kernel = _start(notebook, hook=True)
    kernel.run("old = mib(300)").ok()
    _fails(kernel.run("x = mib(400)\ny = mib(300)"))
    assert [line for commands in _commands(_card(kernel)) for line in commands if "x" in line.split()]

    kernel.run("x = mib(200)").ok()

    assert not [line for commands in _commands(_card(kernel)) for line in commands if "x" in line.split()]


def test_the_cell_that_failed_is_not_its_next_run(notebook: Notebook) -> None:
    """The same source has one name for all of its runs in a traceback."""
    kernel = _start(notebook, hook=True)
    kernel.run("size = 2000").ok()
    _fails(kernel.run("x = mib(size)"))
    failed = _card(kernel)["asked"]["cell"]
    kernel.run("size = 2").ok()
    kernel.run("x = mib(size)").ok()

    assert _card(kernel)["asked"]["cell"] == failed
