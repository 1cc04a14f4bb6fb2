"""torch without the user's additions: a call runs no code of theirs and makes ordinary tensors."""

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
