"""The comparison of two runs of `pytest --gpu-leaks`, here and on a base branch, as Markdown for a pull request. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from nbguard.errors import DamagedDataError, NbguardError
from nbguard.frontend.gpu_leaks.results import GpuLeaks, MemoryOfTest
from nbguard.plain_data import from_plain
from nbguard.render.words import clean
from nbguard.units import format_bytes, signed

MOST_BYTES = 64 << 20
"""Size of a file that is read."""
_MOST = 50
"""Tests that are listed."""


def read_result(text: bytes, name: str) -> GpuLeaks:
    """Return the result in a file of `--gpu-leaks-json` called `name`. Raises NbguardError if it was not written by that."""
    try:
        data = json.loads(text)
        if type(data) is not dict or data.get("kind") != GpuLeaks.kind:
            raise DamagedDataError("it was not written by --gpu-leaks-json")
        fields = {key: value for key, value in data.items() if key not in ("schema", "kind")}
        result: GpuLeaks = from_plain(GpuLeaks, fields, text=lambda each: clean(each, 300))
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, NbguardError) else "it is no JSON"
        raise NbguardError(f"{name} cannot be used: {reason}") from None
    return result


def comment_on(result: GpuLeaks, base: GpuLeaks | None) -> str:
    """Return the comment on tests whose leaks or peaks changed since the base branch, new leaks first; without one, on all."""
    return "\n".join(_lines(result, base)) + "\n"


def _lines(result: GpuLeaks, base: GpuLeaks | None) -> Iterator[str]:
    before = {} if base is None else {test.test: test for test in base.tests}
    after = {test.test: test for test in result.tests}
    names = sorted({name for name in {*before, *after} if _is_different(before.get(name), after.get(name))})
    names.sort(key=lambda name: -(_nbytes(after.get(name)) - _nbytes(before.get(name))))
    total = sum(map(_nbytes, after.values()))
    change = "" if base is None else f" ({signed(total - sum(map(_nbytes, before.values())))} since the base branch)"
    yield f"### GPU memory of tests: {format_bytes(total)} left behind{change}"
    yield ""
    if not names:
        yield "No test changed." if base is not None else "No test left anything."
        return
    yield "| test | left | before | peak | before | holder |"
    yield "|---|--:|--:|--:|--:|---|"
    for name in names[:_MOST]:
        old, new = before.get(name), after.get(name)
        holder = "; ".join(leak.holder for leak in new.leaks) if new is not None else ""
        cells = (_left(new), _left(old), _peak(new), _peak(old))
        yield f"| {_code(name)} | {' | '.join(cells)} | {_code(holder)} |"
    if len(names) > _MOST:
        yield ""
        yield f"and {len(names) - _MOST} more"


def _is_different(old: MemoryOfTest | None, new: MemoryOfTest | None) -> bool:
    return (_nbytes(old), _peak(old)) != (_nbytes(new), _peak(new))


def _nbytes(test: MemoryOfTest | None) -> int:
    return 0 if test is None else test.nbytes


def _left(test: MemoryOfTest | None) -> str:
    return "" if test is None or not test.nbytes else format_bytes(test.nbytes)


def _peak(test: MemoryOfTest | None) -> str:
    return "" if test is None or test.peak is None else format_bytes(test.peak)


def _code(text: str) -> str:
    """Return a name as code in a cell of a table, where `|` would end the cell and a backquote the code."""
    return f"`{text.replace('`', chr(39)).replace('|', chr(166))}`" if text else ""
