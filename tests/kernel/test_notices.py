"""Notices in a real kernel: the line after a cell, its command run, quiet ones, and no reference kept to anything."""

from __future__ import annotations

import pytest

from tests.advice import follow
from tests.kernels import Cell, Kernel

_NEW = "__import__('nbguard').notices()"


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with PyTorch and nbguard, and a way to ask whether what a name was bound to is gone."""
    kernel.run(
        "import gc, weakref, torch\nfrom torch import nn\nfrom torch.multiprocessing.reductions import StorageWeakRef"
    ).ok()
    kernel.run("%load_ext nbguard").ok()
    return kernel


def _line(cell: Cell) -> str:
    return cell.ok().text


def _follow(notebook: Kernel, cell: Cell) -> None:
    """Run each command that a notice printed."""
    command = notebook.value(f"{_NEW}[-1].command")
    assert all(f"`{line}`" in cell.text for line in command.splitlines())
    for line in command.splitlines():
        notebook.run(line).ok()


def test_the_sentences_and_that_their_commands_free_it(notebook: Kernel) -> None:
    notebook.run("big = torch.ones(1 << 20); runs = [0, big]; gone = StorageWeakRef(big.untyped_storage()).expired").ok()
    cell = notebook.run("del big")
    assert (
        _line(cell) == "`big` was deleted, but its 4 MiB is still in memory, held by `runs[1]` (In[3]) · `%reset_gpu runs[1]`"
    )
    assert not notebook.value("gone()")
    _follow(notebook, cell)
    assert notebook.value("gone()")

    notebook.run("net = nn.Linear(1024, 1024); fn = net.forward; gone = weakref.ref(net)").ok()
    cell = notebook.run("net = nn.Linear(1024, 1024)")
    assert _line(cell) == "the earlier `net` (In[6]) is still alive (4 MiB), held by `fn.__self__` (In[6]) · `%reset_gpu fn`"
    _follow(notebook, cell)
    assert notebook.value("gone() is None")

    notebook.run("images = torch.ones(1024, 1024); gone = StorageWeakRef(images.untyped_storage()).expired").ok()
    assert _line(notebook.run("row = images[3]")) == ""
    cell = notebook.run("del images")
    assert _line(cell) == "`row` (4 KiB, a view) keeps 4 MiB of `images` alive · `row = row.clone()`"
    _follow(notebook, cell)
    assert notebook.value("gone()")

    notebook.run("hist = []").ok()
    lines = [notebook.run("hist.append((torch.ones(1 << 20, requires_grad=True) * 2).sum())").ok().text for _ in range(4)]
    expected = "In[16] leaves 4 MiB more; `hist[2]` (In[13]) keeps its graph · `hist[:] = [each.detach() for each in hist]`"
    expected += ", and from now on append `loss.item()` or `t.detach()`"
    assert lines == ["", "", f"each run of {expected}", ""]


_NETS = """
def net(): return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
class Log: pass
log, hist, queue, total, batch = Log(), (), collections.deque(maxlen=99), 0, torch.ones(256, 512)
log.rows = []; model = net()
def loss(): return model(batch).square().mean()
"""
_KEEPERS = {
    "log.rows": ("log.rows.append({'loss': loss(), 'n': 1})", "[log.rows[n]['loss'].detach_() for n in range(6)];"),
    "hist": ("hist += (loss(),)", "[hist[n].detach_() for n in range(6)];"),
    "queue": ("queue.append((1, loss()))", "[queue[n][1].detach_() for n in range(6)];"),
    "total": ("total = total + loss()", "total = total.detach()"),
}


@pytest.mark.parametrize("holder", _KEEPERS)
def test_each_holder_of_graphs_has_a_way_out(notebook: Kernel, holder: str) -> None:
    """A list of dicts, a tuple and a deque had none, and a cell that is run again had only a hint for the next time."""
    code, line = _KEEPERS[holder]
    notebook.run("import collections\n" + _NETS).ok()

    grown = [notebook.run(f"for _ in range(2): {code}").ok() for _ in range(3)][-1]
    assert f"`{line}`, and from now on" in _line(grown)
    cell = notebook.run("model = net()")

    assert _line(cell).endswith(f" · `{line}`")
    promised = notebook.value("__import__('nbguard').notices()[-1].frees")
    assert follow(notebook, line) == promised >= 4 << 20
    assert notebook.value("len(Out)") == 0, "a result that is shown would be kept"


def test_what_is_no_notice(notebook: Kernel) -> None:
    """What is freed, what only the collector frees, what has a name or a new object of its own, what a cleanup says itself."""
    notebook.run("gc.disable(); x = torch.ones(1 << 20); net = nn.Linear(1024, 1024); net.me = net; xs = [x]").ok()
    for code in ("del net", "del xs", "x = x * 2", "x = nn.Parameter(x)", "x = [x]", "best = x[0].view(4, -1)", "del x"):
        assert _line(notebook.run(code)) == ""
    notebook.run("runs = [best]").ok()
    assert "`best` was deleted" not in _line(notebook.run("%reset_gpu best"))
    assert notebook.value(_NEW) == ()


def test_each_accident_is_told_unless_its_name_is_quiet_or_notices_are_off(notebook: Kernel) -> None:
    notebook.run("a, b, c = (torch.ones(1 << 20) for _ in 'abc'); runs = [a, b, c]").ok()
    assert [bool(_line(notebook.run(code))) for code in ("del a", "del b", "exec('d' + 'el c')")] == [True, True, True]
    assert notebook.value(f"[(n.names, n.times, n.cell) for n in {_NEW}]") == [(("a",), 1, 4), (("b",), 1, 5), (("c",), 1, 6)]

    notebook.run("a, b, c = (torch.ones(1 << 20) for _ in 'abc'); d, e, f = [a], [b], [c]").ok()
    notebook.run("%nbguard quiet a").ok()
    assert _line(notebook.run("del a")) == ""
    notebook.run("%nbguard notices off").ok()
    assert _line(notebook.run("del b")) == ""
    listed = notebook.run("%nbguard notices on").ok().text
    assert "`" not in listed.replace("`runs", "")
    assert "a was deleted, but its 4 MiB is still in memory, held by d[0] (In[7])" in listed
    assert _line(notebook.run("del c")).startswith("`c` was deleted")


def test_the_second_accident_is_as_loud_as_the_first(notebook: Kernel) -> None:
    """Each has the row of its own cell; a row says when it no longer holds."""
    notebook.run("m = nn.Linear(1024, 1024); m").ok()
    assert "held by `Out[3]`" in _line(notebook.run("del m"))
    notebook.run("%reset_gpu").ok()
    notebook.run("old = [torch.ones(1 << 20) for _ in range(3)]; old").ok()
    assert "its 12 MiB is still in memory, held by `Out[6]`" in _line(notebook.run("del old"))
    notebook.run("m = nn.Linear(1024, 1024); m").ok()
    assert "held by `Out[8]`" in _line(notebook.run("del m"))
    rows = f"[(n.name, n.cell, n.holders, n.is_left) for n in {_NEW}]"
    expected = [("m", 4, ("Out[3]",), False), ("old", 7, ("Out[6]",), True), ("m", 9, ("Out[8]",), True)]
    assert notebook.value(rows) == expected

    for _ in range(2):  # the same cell run again, with other memory each time
        assert _line(notebook.run("x = torch.ones(1 << 20); kept = [x]")) == ""
        assert _line(notebook.run("del x")).startswith("`x` was deleted, but its 4 MiB is still in memory, held by `kept[0]`")
    assert notebook.value(rows)[-2:] == [("x", 11, ("kept[0]",), False), ("x", 13, ("kept[0]",), True)]


def test_what_a_living_model_uses_is_no_leftover(notebook: Kernel) -> None:
    """Optimizers, lists of parameters, state dicts, schedulers and loaders bound anew; and a notice where one is left."""
    notebook.run(
        "from torch.optim import *\nbody, head = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), nn.Linear(1024, 1024)\n"
        "opt = Adam([*body.parameters(), *head.parameters()]); head(body(torch.ones(2, 1024))).sum().backward(); opt.step()"
    ).ok()
    cells = (
        "for p in body.parameters(): p.requires_grad_(False)",
        "opt = Adam(head.parameters())",
        "parts = list(body.parameters())",
        "parts = parts[:1]",
        "state = body.state_dict()",
        "state = opt.state_dict()",
        "groups = [{'params': body.parameters()}, {'params': head.parameters()}]; opt = SGD(groups, 0.1)",
        "opt = SGD(head.parameters(), 0.1); sched = lr_scheduler.StepLR(opt, 1)",
        "sched = lr_scheduler.StepLR(opt, 2); groups = None",
        "layers = list(body)",
        "body = nn.Sequential(*layers[:1])",
        "ds = torch.utils.data.TensorDataset(torch.ones(4096, 512)); dl = torch.utils.data.DataLoader(ds, 2048)",
        "dl = torch.utils.data.DataLoader(ds, 1024); it = iter(dl); batch = next(it)",
        "batch = next(it)",
        "x = batch[0].view(-1)",
        "x = x.view(1024, -1)",
        "ema = {k: v for k, v in head.named_parameters()}",
        "ema = None",
    )
    for code in cells:
        assert _line(notebook.run(code)) == "", code
    assert notebook.value(_NEW) == ()
    line = "`head` was deleted, but 8.01 MiB of it is still in memory"
    assert _line(notebook.run("del head")).startswith(line), "the optimizer has its parameters"


def test_why_of_a_deleted_name(notebook: Kernel) -> None:
    notebook.run("net = nn.Linear(1024, 1024); runs = [net]").ok()
    notebook.run("del net").ok()
    left = notebook.run("%gpumem why net").ok().text
    assert left.startswith("net was deleted in In[4], but 4 MiB of it is still in memory: only runs[0] (assigned in In[3])")
    assert "runs[0]" in left
    assert "%reset_gpu runs[0]" in left
    notebook.run("runs.clear()").ok()
    assert "nothing of it is left in memory" in notebook.run("%gpumem why net").ok().text
    notebook.run("net = nn.Linear(1024, 1024)").ok()
    assert "deleted" not in notebook.run("%gpumem why net").ok().text
    assert "does not exist" in (notebook.run("%gpumem why other").error or ("", ""))[1]


def test_why_of_a_name_that_a_cleanup_has_released(notebook: Kernel) -> None:
    """It is answered as after `del`, whether the cell that cleaned up named it or not."""
    notebook.run("one, two, rest = torch.ones(1 << 20), [torch.ones(1 << 20)], [torch.ones(1 << 20)]; keep = rest[0]").ok()
    notebook.run("%reset_gpu one").ok()
    of_one = notebook.run("%gpumem why one").ok().text
    assert of_one == "one was released by %reset_gpu one in In[4], and nothing of it is left in memory."
    notebook.run("nbguard = __import__('nbguard'); nbguard.release('two').realised").ok()
    assert notebook.value("__import__('nbguard').why('keep').nbytes") == 4 << 20
    assert "two was released by %reset_gpu two in In[6], and nothing" in notebook.run("%gpumem why two").ok().text
    notebook.run("%reset_gpu --all").ok()
    assert "rest was released by %reset_gpu --all in In[" in notebook.run("%gpumem why rest").ok().text
    notebook.run("two = torch.ones(1 << 20)").ok()
    assert "released" not in notebook.run("%gpumem why two").ok().text


def test_what_a_suspended_generator_or_coroutine_keeps(notebook: Kernel) -> None:
    notebook.run(
        "def make(data):\n    yield 1\n    yield data.sum()\nasync def wait(data):\n    import asyncio; await asyncio.sleep(0); return data"
    ).ok()
    for code, name in (("gen = make(big); next(gen)", "gen"), ("task = wait(big); task.send(None)", "task")):
        notebook.run(f"big = torch.ones(1 << 20); {code}; None").ok()
        cell = notebook.run("del big")
        assert _line(cell).startswith(f"`big` was deleted, but its 4 MiB is still in memory, held by `{name} → "), cell.text
        _follow(notebook, cell)
        assert notebook.value(f"{_NEW}[-1].is_left") is False


def test_one_leak_is_told_once(notebook: Kernel) -> None:
    """The memory and the holder of which a notice has told are no news when another name goes, or when they pile up."""
    notebook.run("class Trainer: pass\nnet = nn.Linear(1024, 1024); trainer = Trainer(); trainer.net = net; keep = [net]").ok()
    assert _line(notebook.run("del net")).startswith("`net` was deleted")
    assert _line(notebook.run("trainer = None")) == ""
    made = notebook.value(f"[(n.names, n.holders, n.times, n.command) for n in {_NEW}]")
    assert made == [(("net",), ("keep[0]",), 1, "%reset_gpu keep[0]")]
    notebook.run("a, b = nn.Linear(1024, 1024), nn.Linear(1024, 1024); both = [a, b]; more = {'a': a}; tail = [b]").ok()
    lines = [_line(notebook.run(code)) for code in ("del a", "del b", "more = None", "both = None", "del tail")]
    assert [line[:15] for line in lines] == ["`a` was deleted", "`b` was deleted", "", "", ""]
    notebook.run("keep.clear(); other = [nn.Linear(1024, 1024)]; net = other[0]; del keep").ok()
    assert _line(notebook.run("del other")) == "", "it has a name"

    notebook.run("hist = []").ok()
    lines = [_line(notebook.run("big = torch.ones(1 << 20); hist.append(big)")) for _ in range(5)]
    assert [line[:18] for line in lines] == ["", "the earlier `big` ", "each run of In[17]", "", ""]
    assert notebook.value(f"[(n.kind, n.names) for n in {_NEW}][-1]") == ("growth", ("big", "hist"))

    notebook.run("kept = []").ok()
    lines = [_line(notebook.run("x = torch.ones(1 << 20); y = x * 2; kept.append((x, y))")) for _ in range(2)]
    assert [line.count("\n") for line in lines] == [0, 0], lines
    assert lines[1].startswith("the earlier `x` and `y` are still alive (8 MiB), held by `kept[0][0]`"), lines


def test_a_name_whose_memory_a_task_has_is_told_once(notebook: Kernel) -> None:
    notebook.run("x = torch.ones(1 << 20); kept = [x]").ok()
    notebook.run("del x").ok()  # a scan, after which the rest has come
    notebook.run(
        "import asyncio\nasync def wait(data): await asyncio.sleep(1000)\n"
        "task = asyncio.create_task(wait(torch.ones(1 << 20))); await asyncio.sleep(0)"
    ).ok()
    notebook.printed = None  # a fork of the kernel has no loop that runs
    cell = notebook.run("del task")
    assert [line[:18] for line in _line(cell).splitlines()] == ["`task` was deleted"]
    assert notebook.value(f"[n.name for n in {_NEW}]") == ["x", "task"]
    _follow(notebook, cell)
    assert not notebook.value(f"{_NEW}[-1].is_left")


def test_little_is_not_worth_a_notice(notebook: Kernel) -> None:
    """Below 1 MiB a hundredth of all memory is, from 512 KiB on."""
    notebook.run(
        "base = torch.ones(3 << 20); big = torch.ones(1 << 20); tiny = torch.ones(30 << 10); some = torch.ones(150 << 10)"
    ).ok()
    notebook.run("bigs, lists, dicts = [big], [tiny], {'a': some}").ok()
    assert _line(notebook.run("del big")).startswith("`big` was deleted, but its 4 MiB is still in memory")
    assert _line(notebook.run("del tiny")) == ""
    assert _line(notebook.run("del some")).startswith(
        "`some` was deleted, but its 600 KiB is still in memory, held by `dicts['a']`"
    )


def test_no_reference_is_kept_and_nothing_grows(notebook: Kernel) -> None:
    """Thousands of cells, of one source and of ever new ones: what nbguard itself has does not grow."""
    notebook.run(
        "import sys\nfrom nbguard.frontend.notebook.session import session_of\n"
        "def cells(n, code):\n"
        "    from nbguard.memory.cells.hooks import CellFact, CellScan\n"
        "    watch = session_of(get_ipython()).notices._watch\n"
        "    for i in range(n):\n"
        "        get_ipython()._nbguard_live._hooks.source = code.format(i)\n"
        "        watch.before(); exec(code.format(i), globals()); watch.after(CellFact(i, False, CellScan(get_ipython())))\n"
        "def size(obj, seen):\n"
        "    if id(obj) in seen or isinstance(obj, (type, type(sys), type(cells))) or obj is get_ipython() or obj is globals(): return 0\n"
        "    seen.add(id(obj))\n"
        "    return sys.getsizeof(obj) + sum(size(ref, seen) for ref in gc.get_referents(obj))\n"
        "def own(): return size(session_of(get_ipython()).notices._watch._watched, set()) + len(session_of(get_ipython()).notices._watch.made(on=True).notices)\n"
        "cells(1000, 'x{0} = torch.ones(3); del x{0}')\nfirst = own()"
    ).ok()
    notebook.run("cells(5000, 'y{0} = torch.ones(3); del y{0}'); cells(5000, 'z = torch.ones(3)'); second = own()").ok()

    assert notebook.value("second < first * 1.3 + 4000"), notebook.value("(first, second)")


def test_what_each_run_of_something_leaves(notebook: Kernel) -> None:
    notebook.run(
        "hist, w = [], torch.ones(1 << 20, requires_grad=True)\ndef step(keep): hist.append((w * 2).pow(2).sum() if keep else 0)"
    ).ok()

    leaking = notebook.run("%gpumem leak 3 step(True)").ok().text
    assert leaking.splitlines()[0].strip() == "3 runs of step(True) left 4 MiB, 4 MiB, 4 MiB: each leaves more"
    assert "4 MiB a run" in leaking
    assert "hist[" in leaking
    assert "keeps its graph" in leaking
    assert "allocated by In[3], line 2 in step()" in leaking
    assert "left nothing" in notebook.run("%gpumem leak 3 step(False)").ok().text
    assert notebook.run("%gpumem leak 3 step +").error == (
        "UsageError",
        "%gpumem leak: step + is not valid Python: invalid syntax",
    )
    failed = notebook.run("%gpumem leak 2 1/0")
    assert failed.error == ("ZeroDivisionError", "division by zero")
    assert "----> 1 1/0" in failed.traceback, failed.traceback
    assert "gpumem.py" not in failed.traceback, failed.traceback
    notebook.run("import nbguard").ok()
    notebook.run("for _ in range(3):\n    with nbguard.watch('step') as rounds: step(True)").ok()
    assert notebook.value("rounds.report.leaks and [nbytes >> 20 for nbytes in rounds.report.rounds[1:]] == [4, 4]")


def test_what_each_run_leaves_to_the_collector(notebook: Kernel) -> None:
    notebook.run(
        "class Trainer: pass\n"
        "def step():\n    t = Trainer(); t.state = {'trainer': t}; t.batch = torch.ones(1 << 20)\n"
        "def plain(): return torch.ones(1 << 20)"
    ).ok()

    leaking = notebook.run("found = %gpumem leak 3 step()").ok().text
    assert "4 MiB, 4 MiB, 4 MiB that only Python's garbage collector frees: a cycle through Trainer" in leaking
    assert notebook.value("[each.nbytes >> 20 for each in found.garbage]") == [4, 4, 4]
    assert notebook.value("found.rounds") == (0, 0, 0)
    assert "left nothing" in notebook.run("%gpumem leak 3 plain()").ok().text


def test_the_code_of_a_leak_is_run_as_it_stands(notebook: Kernel) -> None:
    """IPython would put the value of `k` in the place of `{k: 1}`, and that of `k` in the place of `$k`."""
    notebook.run("k, kept, which = 5, [], 'weights'; weights = torch.ones(1 << 18)").ok()

    notebook.run("%gpumem leak 2 kept.append(({k: 1}, '$k', f'{k}'))").ok()

    assert notebook.value("kept") == [({5: 1}, "$k", "5")] * 2
    assert "weights" in notebook.run("%gpumem why {which}").ok().text
    assert "weights" in notebook.run("def look(which):\n    %gpumem why $which\nlook('weights')").ok().text


def test_what_the_graph_of_a_name_keeps_is_no_leak_of_a_library(notebook: Kernel) -> None:
    """Where Python sees each operation, autograd's own copies of results are objects that nothing in Python refers to."""
    notebook.run(
        "hist, net = [], torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))\n"
        "def step(): hist.append(net(torch.ones(256, 64)))"
    ).ok()

    leaking = notebook.run("%gpumem leak 3 step()").ok().text

    assert "hist[" in leaking
    assert "libraries" not in leaking


def test_what_a_cell_leaves_without_a_name(notebook: Kernel) -> None:
    """By its error, by the result that it shows, by a library's cache; once each, and not what runs out of memory."""
    left = "__import__('nbguard.frontend.notebook.session').frontend.notebook.session.session_of(get_ipython()).notices._watch._left_behind"
    notebook.run_silently(
        f"{left}.patience = 0; {left}._counters.read(); {left}._counters._counters._slow = -1000  # a busy machine must not make malloc too slow"
    )
    (notebook.cwd / "some-packages").mkdir()
    library = "import functools\n@functools.lru_cache\ndef table(size): return __import__('torch').ones(size, 1 << 18)\n"
    (notebook.cwd / "some-packages" / "tables.py").write_text(library)
    notebook.run("import os, sys; sys.path.insert(0, os.path.abspath('some-packages')); import tables").ok()
    notebook.run("def fail():\n    batch = torch.ones(5 << 18)\n    raise KeyError('no such thing')").ok()
    cell = notebook.run("fail()", stop_on_error=False)
    assert cell.text == "In[5] failed, and its error keeps 5 MiB alive · `%reset_gpu`"
    _follow(notebook, cell)
    assert "freed" not in notebook.run("%reset_gpu").ok().text.replace("nothing was freed", "")

    notebook.run("import time\ndef slow(size): time.sleep(0.1); return tables.table(size)").ok()
    cell = notebook.run("y = slow(6)[0, 0].item()")
    assert cell.text.startswith("In[9] left 6 MiB that no name leads to, held by `tables.table"), cell.text
    assert cell.text.endswith("· `import tables; tables.table.cache_clear()`")
    _follow(notebook, cell)

    cell = notebook.run("time.sleep(0.1); nn.Sequential(nn.Linear(1024, 1024))")
    assert cell.text.endswith("In[11] left 4 MiB that no name leads to, held by `Out[11]` · `%reset_gpu`"), cell.text
    _follow(notebook, cell)
    assert notebook.run("time.sleep(0.1); torch.ones(1 << 20).view(-1)").ok().text.count("left") == 0, "data of the user's"


def test_a_name_of_a_part_is_no_surprise(notebook: Kernel) -> None:
    notebook.run("net = nn.Sequential(nn.Linear(1024, 1024)); runs = [net]\nm = net[0]; w, n = net[0].weight, runs[0]").ok()
    for code in ("del m", "w = 3", "del n"):
        assert _line(notebook.run(code)) == ""
    assert _line(notebook.run("del net")).startswith("`net` was deleted")
