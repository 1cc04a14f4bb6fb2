"""The functions that were running at moments of a fit, as sampled, and the known slow calls among them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import dataclass

# --- Qualified names of functions, as the user would call them.


COMPREHENSIONS = frozenset({"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"})
"""Names of code that has none of its own."""
GENERAL = frozenset({"encodes", "__call__", "transform"})
"""Methods with a general name: the name of their class says more."""


def called_name(qualified: str, general: Collection[str] = GENERAL) -> str:
    """Return the name for the user: a method with a `general` name goes by its class, another one by class and name."""
    name = qualified.rpartition("<locals>.")[2]
    owner, _, method = name.rpartition(".")
    return owner if owner and method in general else name


def short_name(qualified: str) -> str:
    """Return the name without classes and functions around it."""
    return qualified.rpartition(".")[2]


# --- Calls that are known to take long in each batch, with the way to recognize a line that makes one, and the remedy.


_SAVE = "save less often: once an epoch, or where the validation has improved"
_WRITE = "collect the output, and write it once an epoch"
_GROW = "collect the parts in a list, and join them once, after the loop"
_OF_LISTS = "of a list of arrays: `torch.from_numpy(np.stack(arrays))`; or make the tensors once, before the loop"
_METRIC = "compute it once an epoch, from the collected predictions"
_DRAW = "draw once an epoch"
_OUT = "leave it out of the loop"
_COLLECT = "call it less often; memory in reference cycles then waits longer, and without such cycles the call frees nothing"
KNOWN_CALLS = {
    "torch.save": _SAVE,
    "deepcopy": "copy less often, and only the `state_dict()` of the best model",
    "torch.tensor": _OF_LISTS,
    "torch.as_tensor": _OF_LISTS,
    "torch.FloatTensor": _OF_LISTS,
    "gc.collect": _COLLECT,
    "empty_cache": _OUT,
    "time.sleep": _OUT,
    "print": "print each 100th batch, and numbers, not whole tables",
    "display": "display once an epoch",
    "open": _WRITE,
    "json.dump": _WRITE,
    "pickle.dump": _WRITE,
    "np.save": _WRITE,
    "np.savez": _WRITE,
    "to_csv": _WRITE,
    "to_parquet": _WRITE,
    "to_pickle": _WRITE,
    "write_text": _WRITE,
    "pd.concat": _GROW,
    "np.append": _GROW,
    "np.concatenate": _GROW,
    "torch.cat": _GROW,
    "plt.subplots": _DRAW,
    "plt.plot": _DRAW,
    "plt.show": _DRAW,
    "savefig": _DRAW,
    "f1_score": _METRIC,
    "roc_auc_score": _METRIC,
    "accuracy_score": _METRIC,
    "precision_score": _METRIC,
    "recall_score": _METRIC,
    "average_precision_score": _METRIC,
    "confusion_matrix": _METRIC,
    "classification_report": _METRIC,
}
"""The remedy by the call, as it is written, without the object in front of a method."""
_CALL = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(KNOWN_CALLS, key=len, reverse=True)))})\(")


def known_call(text: str) -> str:
    """Return the known call that a line of code makes, "" if none, or several different ones."""
    found = set(_CALL.findall(text))
    return found.pop() if len(found) == 1 else ""


CELL = "<module>"
"""The name of the code of a cell, or of a script, outside of functions."""
IMPORTS = "<frozen importlib"
"""Beginning of the name of the file whose code imports modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLine:
    """A line of a function that was running."""

    name: str  # of the function, qualified with its class, from Python 3.11 on
    file: str  # "In[3]" or the name of a file of the user's; of a library the path below the folder of packages
    line: int  # that was running; 0 if unknown
    first: int = 0  # line at which the function begins
    is_users: bool = False  # not of an installed library
    call: str = ""  # of `KNOWN_CALLS`, which the line makes; "": none

    @property
    def short(self) -> str:
        """Return the name of the function without classes and functions around it."""
        return short_name(self.name)

    @property
    def is_inner(self) -> bool:
        """Say whether it is code without a name of its own: a cell's, or that of a comprehension."""
        return self.short == CELL or self.is_comprehension

    @property
    def is_comprehension(self) -> bool:
        """Say whether it is a comprehension's code, which is a part of the line around it."""
        return self.short in COMPREHENSIONS

    @property
    def called(self) -> str:
        """Return its name for the user: a transform goes by its class, a method by class and name."""
        return called_name(self.name)


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
    callers: tuple[tuple[int, int], ...] = ()
    """When loops called their model, or for a loss, a step or cleared gradients, and the number of the stack then."""
    took: int = 0  # nanoseconds of processor time that the samples cost
    waits: tuple[int, ...] = ()  # at each moment: nanoseconds so far of the fit's waits for a processor; () if unknown
    ran: tuple[int, ...] = ()  # at each moment: nanoseconds so far of the fit's thread on a processor; () if unknown

    def held_up(self, start: int, end: int) -> int:
        """Return the most nanoseconds between two times that the fit waited for a processor that others had."""
        return self._between(self.waits, start, end)

    def computed(self, start: int, end: int) -> int | None:
        """Return the most nanoseconds between two times with the fit's thread on a processor, or None if unknown."""
        return self._between(self.ran, start, end) if self.ran else None

    def _between(self, sums: tuple[int, ...], start: int, end: int) -> int:
        """Return the growth of a sum that only grows between the samples around two times."""
        if not sums:
            return 0
        before = bisect_right(self.moments, start) - 1
        after = min(bisect_left(self.moments, end), len(sums) - 1)
        return sums[after] - (sums[before] if before >= 0 else 0)
