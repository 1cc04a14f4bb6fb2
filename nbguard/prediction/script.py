"""The first fit of a script: it is run up to there, and foreseen there instead of being fitted."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from nbguard.errors import NbguardError, UnpredictableError
from nbguard.prediction.cell import CellFit, fits_of_statement
from nbguard.prediction.fits.sources import source_of
from nbguard.prediction.predict import foresee
from nbguard.prediction.prediction import CellPrediction, ForeseenFit

_FITTED = (("fastai.learner", "Learner", "fit"), ("transformers.trainer", "Trainer", "train"))


class _ReachedError(BaseException):
    """The script has come to its fit. No `except Exception` of the script's is to catch it."""


def predict_script(
    file: str, gpu: str | None = None, settings: str | None = None, batch_size: int | None = None
) -> CellPrediction:
    """Return the memory of the first fit of a script: of a Learner, of a Trainer, or of a loop in the script's own lines.

    Everything before the fit runs as ever, with `__name__ == "__main__"`: it makes the data and the model. The fit does not.

    Args:
        file: a path.
        gpu: as of `predict`.
        settings: as of `predict`.
        batch_size: as of `predict`.

    Raises:
        NbguardError: the file cannot be read, is no Python, fails before its fit, or has none that can be foreseen.
    """
    path = Path(file)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise NbguardError(f"{file} cannot be read: {error}") from None
    except SyntaxError as error:
        raise NbguardError(f"{file} is no Python: {error.msg}, line {error.lineno}") from None
    fits = _run(path, tree)
    if not fits:
        raise UnpredictableError(
            f"{file} starts no fit that can be foreseen: no Learner's, no Trainer's, no loop with backward()"
        )
    predictions = (foresee(fit.source, gpu=gpu, settings=settings, batch_size=batch_size, code=fit.code) for fit in fits)
    return CellPrediction(
        told="the script has run up to its fit, which has not",
        fits=tuple(ForeseenFit(text=fit.text, prediction=found) for fit, found in zip(fits, predictions, strict=True)),
    )


def _run(path: Path, tree: ast.Module) -> list[CellFit]:
    """Run a script up to its fit and return that."""
    fits: list[CellFit] = []
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path), "__builtins__": __builtins__}
    with _as_main(path), ExitStack() as patched:
        patched.enter_context(_replaced(torch.Tensor, "backward", _refused_loop))
        wanted = list(_FITTED)
        try:
            for statement in _statements(tree.body):
                found = fits_of_statement(statement, namespace)
                if found:
                    return [found]
                exec(compile(ast.Module([statement], []), str(path), "exec"), namespace)  # noqa: S102 - the user's script, as asked
                for module, name, method in tuple(wanted):
                    if module in sys.modules:
                        kind = getattr(sys.modules[module], name)
                        patched.enter_context(_replaced(kind, method, _noting(fits, method)))
                        wanted.remove((module, name, method))
        except _ReachedError:
            pass
        except NbguardError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the script raises is the reason
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
            raise UnpredictableError(f"{path} fails before its fit ({reason})") from None
        except SystemExit as error:
            raise UnpredictableError(f"{path} ends before its fit (exit {error.code})") from None
    return fits


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a script, those below `if __name__ == "__main__":` among them."""
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in {n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)}:
            yield from statement.body
        else:
            yield statement


def _noting(fits: list[CellFit], method: str) -> Callable[..., None]:
    def fit(fitted: Any, *_: Any, **__: Any) -> None:
        """Note what is fitted and end the script; `fine_tune` goes on to its second fit."""
        caller: Any = sys._getframe(1)
        while caller is not None and str(caller.f_globals.get("__name__", "")).partition(".")[0] in ("fastai", "fastcore"):
            if caller.f_code.co_name == "fine_tune" and not fits:
                fits.append(CellFit(text="fine_tune(), frozen", source=source_of(fitted, None, None)))
                return
            caller = caller.f_back
        line = "" if caller is None else f"line {caller.f_lineno}: "
        fits.append(CellFit(text=f"{line}{method}() of {type(fitted).__name__}", source=source_of(fitted, None, None)))
        raise _ReachedError

    return fit


def _refused_loop(*_: Any, **__: Any) -> None:
    raise UnpredictableError("the script trains in a loop inside a function: foresee it there, by nbguard.predict(step, batch)")


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


@contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """Let the script find itself, and the modules beside it, as if Python ran it."""
    former = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(path)], [os.fspath(path.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = former
