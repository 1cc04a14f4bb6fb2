"""torch without the user's additions, where a call runs no code of theirs and makes ordinary tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def plain_torch() -> Iterator[None]:
    """Leave out tensor subclasses' code and all modes: of functions, of dispatch (fake tensors), of inference."""
    torch: Any = sys.modules["torch"]
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Keep this thread's dispatch modes (a simulated device, a FLOP counter) from seeing operations of ours.

    Unpacking a graph's saved tensors is one. A tensor subclass's own dispatch goes on, unlike under `plain_torch`: torch's
    nested and distributed tensors are unpacked by theirs.
    """
    dispatch: Any = sys.modules["torch.utils._python_dispatch"]
    with dispatch._disable_current_modes():
        yield
