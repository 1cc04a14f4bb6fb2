"""Random notebooks: cells of the zoo one after another in one kernel, then a cleanup. What a name leads to stays, bit by bit.

A notebook is a seed. By hand, many of them: NBGUARD_FUZZ=300 pytest tests/zoo/test_fuzz.py; NBGUARD_FUZZ_FROM=300: from there.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.kernels import Kernel
from tests.zoo.cases import CASES, PRELUDE
from tests.zoo.more_cases import MORE_CASES

_FIRST = int(os.environ.get("NBGUARD_FUZZ_FROM", "0"))
_NOTEBOOKS = range(_FIRST, _FIRST + int(os.environ.get("NBGUARD_FUZZ", "6")))
_CASES = [case for case in (*CASES, *MORE_CASES) if not case.inputs and case.name != "c: recursion"]  # that one takes 20 s

# In the kernel, and written apart from nbguard's own walk: what each of the user's names leads to, tensor by tensor.
_CHECKSUMS = """
import types
import numpy as np
from fastai.callback.progress import ProgressCallback
def _checksums():
    shell, found = get_ipython(), {}
    hidden = shell.user_ns_hidden
    own = lambda name, value: not name.startswith('_') and name not in ('In', 'Out') and hidden.get(name) is not value
    names = {name: value for name, value in shell.user_ns.items() if own(name, value)}
    modules = {id(m.__dict__) for m in list(sys.modules.values()) if type(m) is types.ModuleType}
    for name, value in names.items():
        seen, todo, sums = set(modules), [value], []
        while todo and len(seen) < 150_000:
            obj = todo.pop()
            cls = type(obj)  # never isinstance: some of the zoo's objects answer that themselves
            if id(obj) in seen or issubclass(cls, (types.ModuleType, type, str, int, types.CodeType)) or obj is shell:
                continue
            seen.add(id(obj))
            if cls is ProgressCallback:  # the bars of the last fit may go
                continue
            if issubclass(cls, torch.Tensor):
                todo += [obj.grad_fn, obj.grad if obj.is_leaf else None, obj._base]
                if obj.layout is torch.strided and obj.device.type == 'cpu':
                    sums.append(hash(obj.detach().contiguous().view(-1).numpy().tobytes()))
            elif cls is Learner:  # what a fit that failed left on it may go
                left = ('dl', 'xb', 'yb', 'pred', 'loss', 'loss_grad', 'progress')
                todo += [v for k, v in vars(obj).items() if k not in left and k != 'cbs']
                continue
            elif cls is np.ndarray and obj.dtype == object:
                todo += obj.ravel().tolist()
            todo += gc.get_referents(obj)
        found[name] = sorted(sums)
    return found
builtins._checksums = _checksums; del _checksums
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", _NOTEBOOKS)
def test_nothing_that_a_name_leads_to_changes(kernel: Kernel, seed: int) -> None:
    dice = random.Random(seed)
    cases = dice.sample(_CASES, 5)
    kernel.run(PRELUDE).ok()
    kernel.run("get_ipython().run_line_magic('load_ext', 'nbguard'); None").ok()
    kernel.run("always = learner(); always.fit(1)").ok()  # so that there is something to lose
    for case in cases:
        for source in case.cells:
            kernel.run(source, stop_on_error=False)
    kernel.run_silently(_CHECKSUMS)
    kernel.run_silently("builtins._before = builtins._checksums()")

    kernel.run("%reset_gpu").ok()

    lost = kernel.value("[name for name, sums in builtins._checksums().items() if sums != builtins._before.get(name)]")
    assert not lost, f"{lost}, after {[case.name for case in cases]}"
    assert kernel.value("sum(map(len, builtins._before.values()))") > 0
