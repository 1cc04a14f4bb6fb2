"""The functions that were running at moments of a fit, as the sampler of stacks saw them."""

from __future__ import annotations

from dataclasses import dataclass

_CLASS_SPEAKS = frozenset({"encodes", "__call__", "transform"})
"""Methods with a general name: the name of their class says more."""
CELL = "<module>"
"""The name of the code of a cell, or of a script, outside of functions."""
_INNER = frozenset({CELL, "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLine:
    """A line of a function that was running."""

    name: str  # of the function, qualified with its class, from Python 3.11 on
    file: str  # "In[3]" or the name of a file of the user's; of a library the path below the folder of packages
    line: int  # that was running; 0: not known
    first: int = 0  # line at which the function begins
    is_users: bool = False  # not of an installed library

    @property
    def short(self) -> str:
        """Return the name of the function without classes and functions around it."""
        return self.name.rpartition(".")[2]

    @property
    def is_inner(self) -> bool:
        """Say whether it is code without a name of its own: a cell's, or that of a comprehension."""
        return self.short in _INNER

    @property
    def called(self) -> str:
        """Return its name for the user: a transform goes by its class, a method by class and name."""
        qualified = self.name.rpartition("<locals>.")[2]
        owner, _, method = qualified.rpartition(".")
        return owner if owner and method in _CLASS_SPEAKS else qualified


@dataclass(frozen=True, slots=True, kw_only=True)
class HookFacts:
    """A hook of a module that was trained."""

    function: str  # name of the hook function, as in `StackLine`
    first: int  # line at which it begins
    module: str  # name of the module in its model; "": the model itself
    type: str  # of the module, e.g. "Linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSamples:
    """The stacks of the fit's thread at some moments."""

    lines: tuple[StackLine, ...] = ()  # by number
    stacks: tuple[tuple[int, ...], ...] = ()  # numbers of lines, the outermost first
    moments: tuple[int, ...] = ()  # nanoseconds of the log's clock, in order
    seen: tuple[int, ...] = ()  # number of the stack at each moment
    hooks: tuple[HookFacts, ...] = ()  # of the models that were trained
