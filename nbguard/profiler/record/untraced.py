"""Functions of ours that torch.compile leaves alone: what runs between the user's graphs is not for it to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leave_untraced(function: Callable[..., Any]) -> None:
    """Have torch.compile run a function, and all it calls, as it is: as torch marks its own. Imports nothing of it."""
    import torch

    eval_frame: Any = torch._C._dynamo.eval_frame
    code = function.__code__
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    else:  # torch < 2.8 marks one function at a time
        eval_frame.skip_code(code)
