"""Accident, notice, cleanup, in any order: each accident is told, with its own cell, and the list is true after each step.

The list is `%nbguard notices`, and the panel's rows, findings, notices and card, of which nothing outlives what it is about.
A cleanup is by the panel, the magic, `del`, an assignment, or a restart, after which nothing is said of what was before.

60 in a thorough run, else 10. By hand, more of them: NBGUARD_FUZZ=300 pytest tests/zoo/test_interleavings.py.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.kernels import Zygote
from tests.thorough import THOROUGH

SEEDS = int(os.environ.get("NBGUARD_FUZZ", "60" if THOROUGH else "10"))
TEN = 10  # in one process

# In a process of its own. The truth is torch's weak references, kept apart from nbguard.
PROGRAM = r'''
import contextlib, dataclasses, gc, io, json, random, re, sys, types, warnings
warnings.filterwarnings("ignore")
from IPython.core.interactiveshell import InteractiveShell
import nbguard, torch
from nbguard.frontend.notebook.session import session_of
from nbguard.memory.scan.scan import Notebook
from nbguard.frontend.sidebar.hub.memory_states import MemoryStates
from nbguard.frontend.sidebar.hub.plans import OperationRequest, Plans
from torch.multiprocessing.reductions import StorageWeakRef
import nbguard.memory.scan.devices.counters as counting
counting._OFTEN = 1 << 60  # on a busy machine, too, malloc is asked
shell = InteractiveShell.instance(user_module=types.ModuleType("__main__"))
shell.history_manager.enabled = False
PRELUDE = """
import gc, torch
from torch import nn
def T(): return torch.ones(1 << 19)
def Net(): return nn.Linear(1024, 512)
class Box: pass
def closure(data): return lambda: data.sum()
def generator(data):
    yield 1
    yield data.sum()
async def waiting(data):
    import asyncio
    await asyncio.sleep(0)
    return data
def begun(made):
    made.send(None)
    return made
def failing(batch): raise ValueError("no")
"""
# (the cell before, the cell of the accident, the name of what holds it then); {k} is the number of the accident
ACCIDENTS = [
    ("x{k} = T(); h{k} = [0, x{k}]", "del x{k}", "h{k}"),
    ("x{k} = T(); h{k} = {{'a': x{k}}}", "x{k} = None", "h{k}"),
    ("x{k} = Net(); h{k} = Box(); h{k}.net = x{k}", "x{k} = Net()", "h{k}"),
    ("x{k} = Net(); h{k} = x{k}.forward", "del x{k}", "h{k}"),
    ("x{k} = T(); h{k} = closure(x{k})", "del x{k}", "h{k}"),
    ("x{k} = T(); h{k} = begun(generator(x{k}))", "exec('del x{k}')", "h{k}"),
    ("x{k} = T(); h{k} = begun(waiting(x{k}))", "del x{k}", "h{k}"),
    ("x{k} = T(); h{k} = x{k}[:9]", "del x{k}", "h{k}"),
    ("x{k} = Net(); h{k} = torch.optim.SGD(x{k}.parameters(), 0.1)", "del x{k}", "h{k}"),
    ("x{k} = T(); w{k} = torch.ones(1, requires_grad=True); h{k} = (w{k} * x{k}).sum()", "x{k} = 0", "h{k}"),
    ("x{k} = Net(); x{k}", "del x{k}", ""),
    ("x{k} = T(); failing(x{k})", "del x{k}", ""),
]

def run(source):
    """Run a cell; return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        result = shell.run_cell(source, store_history=True)
    assert result.error_before_exec is None, source
    assert result.error_in_exec is None or "failing(" in source, (source, result.error_in_exec)
    return out.getvalue()

def refs(name):
    value = shell.user_ns[name]
    tensors = [value] if isinstance(value, torch.Tensor) else list(value.parameters())
    return [StorageWeakRef(one.untyped_storage()) for one in tensors]

class Accident:
    def __init__(self, kind, number):
        before, self.code, self.holder = (text.format(k=number) for text in ACCIDENTS[kind])
        self.name = f"x{number}"
        run(before)
        self.refs = refs(self.name)
        self.cell = shell.execution_count
        said = run(self.code)
        mine = [n for n in nbguard.notices() if n.cell == self.cell]
        assert [n.name for n in mine] == [self.name], (self.code, said, mine)
        assert mine[0].is_left and f"`{self.name}`" in said, (self.code, said, mine)
    @property
    def is_left(self):
        return not all(ref.expired() for ref in self.refs)
    def cure(self, how):
        now = [n for n in nbguard.notices() if n.cell == self.cell][0]
        if how == "magic" or not self.holder:
            for line in (now.command or f"%reset_gpu {self.holder}").splitlines(): run(line)
        elif how == "panel":
            view = plans.show(OperationRequest("release", (self.holder,)))
            assert view.token, view
            plans.apply(view.token)
        else:
            run(("del {0}" if how == "del" else "{0} = None").format(self.holder))
        gc.collect()
        assert not self.is_left, (self.code, how, now)

def said_now():
    """Return all that the panel shows, and the list."""
    states.take_back()
    if states.is_outdated:
        states.look()
    return json.dumps(dataclasses.asdict(states.last)), run("%nbguard notices")

def check(accidents, when):
    rows = {n.cell: n for n in nbguard.notices()}
    gc.collect()  # an error that another one has followed may wait for the collector, which is nothing that is left
    for one in accidents:
        row = rows[one.cell]
        assert row.is_left == one.is_left, (when, one.code, row)
        assert not row.is_left or row.holders, row
    shown, listed = said_now()
    for one in accidents:
        names = [one.name] + ([one.holder] if one.holder else [])
        for where, text in (("the panel", shown), ("the list", listed)):
            said = [name for name in names if re.search(rf"\b{name}\b", text) and (one.is_left or name not in shell.user_ns)]
            has_room = where == "the list" or sum(each.is_left for each in accidents) <= 4  # as many as the panel lists
            assert bool(said) == one.is_left or (one.is_left and not has_room), (when, where, one.code, said, text[:3000])

def begin():
    """Load nbguard, and open a panel."""
    global states, plans
    run(PRELUDE); run("%load_ext nbguard")
    session, notebook = session_of(shell), lambda: Notebook(shell=shell, namespace=shell.user_ns)
    of_session = session.notices.current, session.memory.recall_card
    states = MemoryStates(notebook, f"boot {random.random()}", lambda: (shell.execution_count, None), *of_session)
    plans = Plans(notebook)

def restart(accidents):
    """Begin anew in the same process, as a kernel's restart does in another: nothing is left, and nothing is said."""
    run("%unload_ext nbguard")
    shell.reset(new_session=True)
    shell.InteractiveTB.tb = shell.last_execution_result = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"): sys.__dict__.pop(name, None)
    begin()
    gc.collect()
    states.look()
    assert not any(one.is_left for one in accidents)
    assert not list(nbguard.notices())
    for text in said_now():
        said = [one.name for one in accidents if re.search(rf"\b({one.name}|{one.holder or one.name})\b", text)]
        assert not said, ("after a restart", said, text[:3000])

def play(seed):
    dice, open_ones, accidents = random.Random(seed), [], []
    steps = [True] * 4 + [False] * 3
    dice.shuffle(steps)
    for is_accident in steps:
        if is_accident or not open_ones:
            one = Accident(dice.randrange(len(ACCIDENTS)), f"{seed}_{len(accidents)}")
            accidents.append(one); open_ones.append(one)
            open_ones = [each for each in open_ones if each.is_left]  # the last error is the next one's
            check(accidents, f"after {one.code}")
        else:
            one = open_ones.pop(dice.randrange(len(open_ones)))
            how = dice.choice(["magic", "magic", "panel", "del", "rebind"])
            one.cure(how)
            check(accidents, f"after the cure of {one.code} by {how}")
            open_ones = [each for each in open_ones if each.is_left]
    if seed % 3 == 0:
        restart(accidents)

begin()
if IS_FROZEN:  # the libraries' half a million objects, which lead to none of the notebook's
    gc.collect()
    gc.freeze()
    gc.unfreeze, gc.get_freeze_count = lambda: None, lambda: 0
failed = {}
for seed in SEEDS:
    try:
        play(seed)
    except AssertionError as error:
        failed[seed] = str(error)[:1500]
    run("for name in [n for n in globals() if n[:1] in 'xhw' and n[1:2].isdigit()]: del globals()[name]"); run("%reset_gpu")
print("RESULT" + json.dumps(failed))
'''


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, TEN))
def test_interleavings(first: int, torch_zygote: Zygote) -> None:
    seeds = f"range({first}, {min(first + TEN, SEEDS)})"
    out, errors = torch_zygote.run(f"SEEDS, IS_FROZEN = {seeds}, {not THOROUGH}\n{PROGRAM}", {}, 300)
    _, mark, result = out.rpartition("RESULT")

    assert mark, errors[-3000:] + out[-1000:]
    assert json.loads(result) == {}
