"""What several tests of predictions have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from tests.frozen import frozen_in_package  # noqa: F401 - for all tests here

_EACH = """
{imports}
import os, sys, traceback
for case in {cases!r}:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            sys.modules["torch"].cuda._is_in_bad_fork = lambda: False  # the fake device is memory of this process
            exec({code!r}, {{"case": case}})
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""


def each_on_the_fake_device(
    run: Callable[..., str], imports: str, code: str, cases: Iterable[str], **options: object
) -> dict[str, Any]:
    """Return the JSON that `code` prints as its last line, by `case`: each has a process of its own, the imports are made once.

    Args:
        run: the fixture `fake_cuda_run`.
        imports: what is run before, once. It must not use the device.
        code: prints `RESULT` and JSON; the name `case` is bound in it.
        cases: one after the other.
        options: of `run`.
    """
    printed = run(_EACH.format(imports=imports, cases=list(cases), code=code), timeout=280, **options)
    found = [line.removeprefix("RESULT") for line in printed.splitlines() if line.startswith("RESULT")]
    return dict(zip(cases, map(json.loads, found), strict=True))
