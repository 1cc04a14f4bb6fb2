"""The stand-in for the `forward` of a module: a guard sees its calls by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any


class GuardedForward:
    """Stands in for the `forward` of one module object. Copies and pickles of the module have its own again."""

    def __init__(self, call: Callable[..., Any], module: Any) -> None:
        self.module = module
        self.former = module.__dict__.get("forward")
        self.original: Callable[..., Any] = module.forward
        self.is_tried = False  # divided calls have been found to give the same
        self.draws = False  # a call draws random numbers
        self._call, self._is_on = call, False
        update_wrapper(self, getattr(self.original, "__func__", self.original))
        self.__wrapped__ = self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, guarded."""
        return self._call(self, args, kwargs) if self._is_on else self.original(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")

    def put(self) -> None:
        """Stand in from now on."""
        self._is_on = True
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        """Put the module's own back, unless another stands over it; that one calls through from now on."""
        self._is_on = False
        if self.module.__dict__.get("forward") is not self:
            return
        if self.former is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.former
