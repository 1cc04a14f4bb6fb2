"""What `%reset_gpu` does only when asked: exceptions that the user keeps, compiled code."""

from __future__ import annotations

import json

from tests.kernels import Kernel
from tests.zoo.cases import SHOWS_SMALL

_SETUP = (
    SHOWS_SMALL
    + """
%load_ext nbguard
import asyncio, concurrent.futures, gc, torch
from torch.multiprocessing.reductions import StorageWeakRef
refs = {}
def fail(name, size):
    batch = torch.ones(size, 1024)
    refs[name] = StorageWeakRef(batch.untyped_storage())
    kept = torch.ones(7)
    raise ValueError(f'{name} is wrong')
def alive(): return {name for name, ref in refs.items() if not ref.expired()}
"""
)
_KEPT = """
try: fail('variable', 100)
except ValueError as error: e = error
errors = []
try: fail('list', 200)
except ValueError as error: errors.append(error)
pool = concurrent.futures.ThreadPoolExecutor(1)
future = pool.submit(fail, 'future', 300)
async def job(): fail('task', 400)
task = asyncio.ensure_future(job()); await asyncio.sleep(0.1)
"""


def test_exceptions_that_a_name_keeps_are_reported_and_released_on_consent(kernel: Kernel) -> None:
    kernel.run(_SETUP).ok()
    kernel.run(_KEPT).ok()

    report = json.loads(kernel.run("%gpumem --json").ok().text)
    named = [finding["sentence"].split()[0] for finding in report["findings"] if finding["kind"] == "kept_error"]
    assert named == ["e", "errors", "future", "task"]
    kernel.run("%reset_gpu").ok()
    assert kernel.value("alive()") == {"variable", "list", "future", "task"}

    outcome = json.loads(kernel.run("%reset_gpu --errors --json").ok().text)

    assert kernel.value("alive()") == set()
    assert outcome["realised"] == outcome["plan"]["promised"] == (100 + 200 + 300 + 400) * 4096 + 4 * 28
    assert not outcome["undone"]
    assert not outcome["survivors"]
    found = kernel.value("[str(x) for x in (e, errors[0], future.exception(), task.exception())]")
    assert found == ["variable is wrong", "list is wrong", "future is wrong", "task is wrong"]
    shown = "import traceback; traceback.print_exception(type(e), e, e.__traceback__)"
    assert "in fail" in kernel.run(shown).ok().stderr
    frame = "e.__traceback__.tb_next.tb_frame.f_locals"
    assert "released by %reset_gpu: Tensor 100×1024" in kernel.value(f"repr({frame}['batch'])")
    again = json.loads(kernel.run("%reset_gpu --errors --json").ok().text)
    assert again["plan"]["promised"] == 0


def test_what_a_live_name_needs_stays_in_such_a_frame(kernel: Kernel) -> None:
    kernel.run(_SETUP).ok()
    kernel.run(
        "def use(shared):\n    own = torch.ones(50, 1024)\n    raise KeyError(own.shape)\nmine = torch.ones(60, 1024)\n"
        "try: use(mine)\nexcept KeyError as error: e = error"
    ).ok()

    outcome = json.loads(kernel.run("%reset_gpu --errors --json").ok().text)

    assert outcome["realised"] == outcome["plan"]["promised"] == 50 * 4096
    assert kernel.value("e.__traceback__.tb_next.tb_frame.f_locals['shared'] is mine and float(mine.sum()) == 60 * 1024")


def test_compiled_code_is_dropped_on_consent(kernel: Kernel) -> None:
    kernel.run(_SETUP).ok()
    assert "nothing has been compiled" in kernel.run("%reset_gpu --compiled").ok().text
    kernel.run("net = torch.compile(torch.nn.Linear(4, 4), backend='eager'); y = net(torch.ones(1, 4)).detach()").ok()

    text = kernel.run("%reset_gpu --compiled").ok().text

    assert "compiled code dropped" in text
    assert "nothing has been compiled" in kernel.run("%reset_gpu --compiled").ok().text
    assert kernel.value("torch.equal(net(torch.ones(1, 4)).detach(), y)")


_CACHED = """
import functools, torch
from torch import nn
@functools.lru_cache
def by_argument(model): return 1
@functools.cache
def by_result(size): return torch.ones(size, 1024)
table = torch.ones(70, 1024)
def lookup():
    mine = torch.ones(80, 1024)
    @functools.lru_cache
    def inner(n, extra): return mine[n]
    return inner
inner = lookup()
@functools.lru_cache
def of_live(tensor): return tensor.shape
"""


def test_caches_of_functions_are_emptied_on_consent(kernel: Kernel) -> None:
    """What a cache alone keeps goes: its function, with all that the function leads to, stays, as does what a name needs."""
    kernel.run(_SETUP + _CACHED).ok()
    kernel.run("by_argument(nn.Linear(100, 100, bias=False)); by_result(40); by_result(50); of_live(table); None").ok()
    kernel.run("inner(0, torch.ones(60, 1024)); None").ok()

    assert "nothing was stale" in kernel.run("%reset_gpu").ok().text
    planned = json.loads(kernel.run("%reset_gpu --caches --dry-run --json").ok().text)
    assert kernel.value("by_result.cache_info().currsize") == 2
    outcome = json.loads(kernel.run("%reset_gpu --caches --json").ok().text)

    nbytes = 100 * 100 * 4 + (40 + 50 + 60) * 4096
    assert planned["promised"] == outcome["plan"]["promised"] == outcome["realised"] == nbytes
    emptied = {action["subject"] for action in outcome["done"] if action["kind"] == "function_cache"}
    assert emptied == {"cache of by_argument", "cache of by_result", "cache of inner"}
    assert "cannot be undone" in outcome["done"][0]["detail"]
    assert kernel.value("of_live.cache_info().currsize, inner.cache_info().currsize") == (1, 0)
    assert kernel.value("float(inner.__wrapped__(0, 1).sum())") == 1024  # what the function itself needs has stayed
    again = kernel.run("%reset_gpu --caches").ok().text
    assert "there is nothing to empty" in again


def test_with_targets_only_their_caches_are_emptied(kernel: Kernel) -> None:
    kernel.run(_SETUP + _CACHED).ok()
    kernel.run("model = nn.Linear(100, 100, bias=False); by_argument(model); by_result(40); None").ok()

    (kept,) = json.loads(kernel.run("%reset_gpu model --json").ok().text)["plan"]["kept"]
    assert [(keeper["path"], keeper["how"]) for keeper in kept["keepers"]] == [("by_argument", "cache")]
    assert (kept["advice"]["command"], kept["advice"]["frees"]) == ("%reset_gpu model --caches", 100 * 100 * 4)
    kernel.run("model = nn.Linear(100, 200, bias=False); by_argument(model); None").ok()
    outcome = json.loads(kernel.run(kept["advice"]["command"] + " --json").ok().text)

    assert outcome["realised"] == outcome["plan"]["promised"] == (100 * 100 + 100 * 200) * 4
    assert kernel.value("by_argument.cache_info().currsize, by_result.cache_info().currsize") == (0, 1)
