"""Errors that nbguard raises on purpose, each with a message that says what to do next, and the line of those it did not."""

from __future__ import annotations

from nbguard.texts import Host, form, here, printable

_MOST = 160
"""Characters of a message of somebody else's."""


class NbguardError(Exception):
    """Base of every error nbguard raises on purpose.

    Its message is one line that can be printed, whatever it quotes. Where there are no magics it names calls of Python.
    """

    def __str__(self) -> str:
        return self.said(here())

    def said(self, where: Host) -> str:
        """Return the message in the words of a host."""
        words = self.args[0] if len(self.args) == 1 and isinstance(self.args[0], str) else super().__str__()
        return printable(form(words, where))


class TargetError(NbguardError, ValueError):
    """A name given to `%reset_gpu` or `%gpumem why` cannot be used; nothing was touched."""


class NoTorchError(NbguardError, RuntimeError):
    """PyTorch is not imported in this process, so there is nothing to look at yet."""

    def __init__(self) -> None:
        super().__init__(
            "PyTorch is not imported in this kernel yet: there is no memory to look at. Import torch, then run it again."
        )


class OldHeapError(NbguardError):
    """A sidebar asked about rows of a list that is no longer true; nothing was touched."""

    def __init__(self) -> None:
        super().__init__("this list was out of date; it has been updated, please try again")


class ParkedError(NbguardError, RuntimeError):
    """A parked model was called. Its tensors are in host memory until `%reset_gpu --unpark` brings them back."""


class StoppedAtNaN(NbguardError, ArithmeticError):  # noqa: N818 - what happened, in a word
    """A fit was stopped before values that are NaN or infinite reached the parameters; the message says where from."""


class SettingsError(NbguardError, ValueError):
    """A string of allocator settings cannot be used; the message names the key."""


class UnpredictableError(NbguardError):
    """The memory of a fit cannot be predicted; the message names the operator, module or object that prevents it."""


class ReachedError(BaseException):
    """A script whose memory is predicted came to its fit, which it names. No `except Exception` of its own may catch it."""


class UndiagnosableError(NbguardError, ValueError):
    """A model cannot be tried as it was given; the message says what is missing. Nothing has been changed."""


class RunRecordError(NbguardError, ValueError):
    """There is no record of a run where one was asked for; the message says what there is, and how to write one."""


class SnapshotError(NbguardError, ValueError):
    """A file is no memory snapshot that can be read; the message says what is wrong with it."""


class RankFactsError(NbguardError, ValueError):
    """A file is no dump of PyTorch's flight recorder and no facts of a rank; the message says what is wrong with it."""


class ProfileFileError(NbguardError, ValueError):
    """A file is no saved profile that can be read; the message says what is wrong with it."""


class DamagedDataError(NbguardError, ValueError):
    """Plain data are not those of a class; the message names the field. Whoever reads a file says in its own error which."""


class ModelError(NbguardError, ValueError):
    """The allocator model was asked for something that no program can do, such as freeing an address twice."""


class SimulatedOutOfMemoryError(NbguardError, RuntimeError):
    """The modelled device has no room for a request, after everything the allocator tries was tried.

    `size` is the rounded request and `free` the device's remaining memory, both in bytes.
    """

    def __init__(self, size: int, free: int | None) -> None:
        super().__init__(f"out of memory on the modelled device: {size} bytes asked for, {free} bytes free on it")
        self.size = size
        self.free = free


def line_of(error: Exception) -> str:
    """Return the line of code that raised an error, as `module:number`, for a report of a mistake of ours."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "?" if traceback is None else f"{traceback.tb_frame.f_globals.get('__name__')}:{traceback.tb_lineno}"


def in_one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, for a sentence that names what another one said."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:_MOST]}"
