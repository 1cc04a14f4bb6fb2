"""What several tests of predictions have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tests.fake_cuda.plugin import CHECK, fake_settings
from tests.frozen import frozen_in_package  # noqa: F401 - for all tests here
from tests.kernels import Zygote

_EACH = """
{imports}
import os, sys, traceback
for case in {cases!r}:
    if (child := os.fork()) == 0:
        try:
            exec({code!r}, {{"case": case}})
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""


def each_on_the_fake_device(zygote: Zygote, imports: str, code: str, cases: Iterable[str]) -> dict[str, Any]:
    """Return the JSON that `code` prints after `RESULT`, by `case`: each has a process of its own, the imports are made once.

    Args:
        zygote: of `fake_cuda_zygote`.
        imports: what is run before, once. It must not ask CUDA for anything: forks could not use it then.
        code: the name `case` is bound in it.
        cases: one after the other.
    """
    program = _EACH.format(imports=imports, cases=list(cases), code=CHECK + code)
    printed, errors = zygote.run(program, fake_settings(PYTORCH_NVML_BASED_CUDA_CHECK=1), 280)
    found = [line.removeprefix("RESULT") for line in printed.splitlines() if line.startswith("RESULT")]
    assert len(found) == len(list(cases)), errors[-4000:]
    return dict(zip(cases, map(json.loads, found), strict=True))
