"""The zoo's cases with their models, data and tensors on a CUDA device. What is true of them stays the same.

A cell is rewritten where it builds something; nothing else in it changes:

- `torch.ones(9)`, `nn.Linear(2, 3)` and their like are built on the host and moved: `torch.ones(9).cuda()`. So their values
  are right on the fake device too, where kernels compute nothing. Methods called at once come first: `.to_sparse().cuda()`;
- `x.sum()` of a variable reads what the host put there: `x.cpu().sum()`;
- `'cpu'` becomes `'cuda'`;
- a text that holds such code (for `exec`, for a script) is rewritten in the same way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from tests.zoo.cases import Case

_BUILDERS = {"torch.arange", "torch.eye", "torch.ones", "torch.randint", "torch.randn", "nn.Linear"}

_OTHER_CELLS = {
    # forked workers cannot touch the device: they make the batch on the host, as users' workers do
    "an iterator with workers, named": (
        "dl = torch.utils.data.DataLoader([torch.ones(4)] * 64, batch_size=8, num_workers=2); it = iter(dl)",
        "xb = next(it).cuda(); track('data', xb)",
    ),
}


def case_on_cuda(case: Case) -> Case:
    """Return the case with all that its cells build on the device."""
    cells = _OTHER_CELLS.get(case.name) or tuple(on_cuda(cell) for cell in case.cells)
    return replace(case, cells=cells, check=on_cuda(case.check))


def on_cuda(source: str) -> str:
    """Return the cell `source` with all that it builds on the device. Magics build nothing."""
    if source.startswith("%%"):
        return source
    code = re.sub("(?m)^%", "#", source)  # of the same length, so that all the rest is where it was
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    text = source.encode()
    edits = sorted(
        (starts[first] + column, starts[last] + end, new) for (first, column), (last, end), new in _edits(ast.parse(code))
    )
    for start, end, new in reversed(edits):
        text = text[:start] + new.encode() + text[end:]
    return text.decode()


_Place = tuple[int, int]


def _edits(tree: ast.AST) -> Iterator[tuple[_Place, _Place, str]]:
    """Yield (start, end, new text) of what changes; places are (line, column), both from 0."""
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value == "cpu":
                yield _start(node), _end(node), "'cuda'"
            elif any(f"{name}(" in node.value for name in _BUILDERS):
                yield _start(node), _end(node), repr(on_cuda(node.value))
        elif isinstance(node, ast.Call) and node not in inner:
            calls = list(_chain(node))
            inner.update(calls)
            if ast.unparse(calls[-1].func) in _BUILDERS:
                yield _end(node), _end(node), ".cuda()"
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "sum":
                of = node.func.value
                if isinstance(of, (ast.Name, ast.Subscript)):
                    yield _end(of), _end(of), ".cpu()"


def _chain(node: ast.Call) -> Iterator[ast.Call]:
    """Yield the calls of `a().b().c()`, from the last to the first."""
    yield node
    while isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        node = node.func.value
        yield node


def _start(node: ast.expr) -> _Place:
    return node.lineno - 1, node.col_offset


def _end(node: ast.expr) -> _Place:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno - 1, node.end_col_offset
