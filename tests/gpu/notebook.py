"""A notebook without Jupyter: cells in IPython's own shell, in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from typing import Any

Json = dict[str, Any]

_FIRST = """
import gc, torch, nbguard
from torch import nn
gc.disable()  # a cycle goes when it is collected, not by chance before
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(1024, 2048), nn.Linear(2048, 10)
    def forward(self, x):
        return self.head(self.body(x).relu())
def batch(): return torch.zeros(256, 1024, device='cuda')
def allocated(): return torch.cuda.memory_allocated()
def pinned():
    if torch.__version__ < (2, 13):
        return 0  # its counter of what is in use never goes down
    torch.cuda.synchronize(); torch.empty(1, pin_memory=True)  # an allocation is when the host's allocator looks at its events
    return getattr(torch.cuda, 'host_memory_stats', dict)().get('active_bytes.current', 0)
net = Net().cuda(); net(batch()).sum().backward(); torch.optim.Adam(net.parameters())
del net  # cuBLAS has its workspaces and torch has imported what an optimizer needs: from here on only holders differ
gc.collect(); start = allocated()
%load_ext nbguard
"""


def run(cells: list[str]) -> Json:
    """Run the cells of a notebook on the GPU and return `value` as the last one leaves it.

    `errors` are the names of the errors by the cells' numbers, `text` what the cells displayed and printed.
    """
    os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix="nbguard-ipython-")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config(HistoryManager={"hist_file": ":memory:"}))
    errors: dict[int, str] = {}
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for number, source in enumerate([_FIRST, *cells]):
            if name := _run_cell(shell, source):
                errors[number] = name
    return {"errors": errors, "text": shown.getvalue(), "value": shell.user_ns.get("value")}


def _run_cell(shell: Any, source: str) -> str:
    """Run one cell; return its error's name. The result must not stay in a variable: it holds the traceback."""
    error = shell.run_cell(source, store_history=True).error_in_exec
    return "" if error is None else type(error).__name__
