"""Notices in every case of the zoo: there exactly if what a cell has deleted or bound anew is alive, by weak references.

All cases in a thorough run (`tests/thorough.py`), else some of them. And in random notebooks, cells of the zoo one after
another: by hand, many of them: NBGUARD_FUZZ=300 pytest tests/zoo/test_notices.py -k random; NBGUARD_FUZZ_FROM=300: from there.
"""

from __future__ import annotations

import json
import os
import random

import pytest

from tests.kernels import Kernel
from tests.thorough import THOROUGH, spread
from tests.zoo.cases import CASES, PRELUDE, Case
from tests.zoo.more_cases import MORE_CASES
from tests.zoo.sequences import SEQUENCES

# In the kernel, and written apart from nbguard: the names bound to a tensor, module or Learner, before a cell and after it.
TRUTH = r"""
def _experiments():
    hidden, space = get_ipython().user_ns_hidden, get_ipython().user_ns
    own = lambda name: not name.startswith('_') and hidden.get(name) is not space[name]
    kinds = lambda value: set(type(value).__mro__) & {torch.Tensor, nn.Module, Learner}
    return {name: value for name, value in space.items() if own(name) and kinds(value)}
def _storages(value):
    cls = type(value)
    if torch.Tensor in cls.__mro__: tensors = [value]
    else: tensors = list((value.model if Learner in cls.__mro__ else value).parameters())
    return [StorageWeakRef(t.untyped_storage()) for t in tensors if t.layout is torch.strided and t.data_ptr()]
def _is_part_of_a_name(name, obj):
    # whether a cell before this one bound the name last by `name = other.path`, and that path still leads to the object,
    # or does since `other = [other]`
    path = rf"(?:^|[;\n])\s*{name} *= *([A-Za-z]\w*(?:[.]\w+|\[[^\]]*\])*) *(?=$|[;#\n])"
    found = [one for source in In[:-1] for one in re.findall(path, source)]
    for written in (found[-1], re.sub(r"^(\w+)", r"\1[0]", found[-1])) if found else ():
        try:
            if eval(written, get_ipython().user_ns) is obj: return True
        except Exception: pass
    return False
def _before_cell():
    builtins._bound = {name: (weakref.ref(value), _storages(value)) for name, value in _experiments().items()}
    builtins._told = {(n.kind, n.shape): n.times for n in nbguard.notices()}
def _after_cell():
    now, found = _experiments(), {}
    gone = {name: refs for name, refs in builtins._bound.items() if now.get(name) is not refs[0]() or refs[0]() is None}
    before = lambda notice: builtins._told.get((notice.kind, notice.shape), 0)
    new = [(n, n.names[before(n) - n.times:]) for n in nbguard.notices() if n.times > before(n)]  # the latest names last
    told, before_it = {}, {}  # by the id of an object: the names that it had before the cell
    for name, (ref, _) in builtins._bound.items():
        before_it.setdefault(id(ref()), []).append(name)
    for name in gone:
        mine = [n for n, names in new if name in (n.names if n.kind == 'growth' else names)]  # a growth tells of all its names
        told[name] = ([list(n.holders) for n in mine], any(n.is_whole for n in mine if n.kind != 'growth'))
    if gone:
        gc.collect()
    for name, (ref, storages) in gone.items():
        is_alive = ref() is not None and not all(s.expired() for s in storages)
        new = get_ipython().user_ns.get(name)
        is_wanted = type(new) is list and any(item is ref() for item in new)  # the new object leads to the earlier one
        is_wanted = is_wanted or (torch.Tensor in type(new).__mro__ and new._base is ref())  # a view of it
        had = before_it.get(id(ref()), ())
        others = [other for other, value in now.items() if value is ref() and (name in now or other not in had)]
        is_wanted = is_wanted or bool(others)  # it goes by another name, given before this one was deleted by its cell alone
        is_wanted = is_wanted or _is_part_of_a_name(name, ref())
        found[name] = (is_alive and not is_wanted, *told[name])
    return found
import nbguard, builtins, re
from nbguard.frontend.notebook.session import session_of
session_of(get_ipython()).notices._watch.least = 1
builtins._before_cell, builtins._after_cell = _before_cell, _after_cell; del _before_cell, _after_cell
builtins._is_part_of_a_name, builtins.re = _is_part_of_a_name, re; del _is_part_of_a_name, re
builtins._experiments, builtins._storages = _experiments, _storages; del _experiments, _storages
"""


_FIRST = int(os.environ.get("NBGUARD_FUZZ_FROM", "0"))
_NOTEBOOKS = range(_FIRST, _FIRST + int(os.environ.get("NBGUARD_FUZZ", "3")))
_CASES = [case for case in (*CASES, *MORE_CASES) if not case.inputs and case.name != "c: recursion"]  # that one takes 20 s


@pytest.mark.slow
@pytest.mark.parametrize("case", spread([*CASES, *MORE_CASES], 8), ids=lambda case: case.name)
def test_a_notice_is_there_exactly_if_it_is_alive(kernel: Kernel, case: Case) -> None:
    _load(kernel)
    for source in case.cells:
        _run(kernel, source, case.inputs)
    for number, name in enumerate(kernel.value("list(builtins._experiments())")):
        _run(kernel, f"{name} = None" if number % 2 else f"del {name}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", _NOTEBOOKS)
def test_random_notebooks(kernel: Kernel, seed: int) -> None:
    dice = random.Random(seed)
    _load(kernel)
    for case in dice.sample(_CASES, 4):
        for source in case.cells:
            _run(kernel, source)
        names = kernel.value("list(builtins._experiments())")
        for name in dice.sample(names, min(len(names), 2)):
            _run(kernel, dice.choice(["del {0}", "{0} = None", "{0} = [{0}]", "exec('del {0}')"]).format(name))


@pytest.mark.skipif(not THOROUGH, reason="a minute each, in a thorough run")
@pytest.mark.parametrize("seed", range(4))
def test_a_long_session(kernel: Kernel, seed: int) -> None:
    dice = random.Random(seed)
    _load(kernel)
    sequences = list(SEQUENCES.values())
    dice.shuffle(sequences)
    while sequences:
        running = [list(sequences.pop()) for _ in range(min(len(sequences), dice.choice((1, 1, 2, 3))))]
        while any(running):
            _run(kernel, dice.choice([cells for cells in running if cells]).pop(0))


def _load(kernel: Kernel) -> None:
    kernel.run(PRELUDE).ok()
    kernel.run("get_ipython().run_line_magic('load_ext', 'nbguard'); None").ok()
    kernel.run_silently(TRUTH)


def _run(kernel: Kernel, source: str, inputs: tuple[str, ...] = ()) -> None:
    """Run a cell and compare the notices after it with what is alive."""
    kernel.run_silently("builtins._before_cell()")
    kernel.run(source, inputs=inputs, stop_on_error=False)
    _diagnose(kernel, source)


def _diagnose(kernel: Kernel, source: str) -> None:
    left = json.loads(kernel.value("__import__('json').dumps(builtins._after_cell())"))
    for name, (is_alive, holders, is_whole) in left.items():
        assert holders or not is_alive, f"missed: {name} is alive after {source}"
        assert is_alive or not is_whole, f"false: {name} is gone after {source}, said to be held by {holders}"
