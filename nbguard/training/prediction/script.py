"""The first fit of a script, which is run up to there and then predicted instead of fitted."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import multiprocessing.process
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from nbguard.errors import NbguardError, ReachedError, UndiagnosableError, UnpredictableError, in_one_line
from nbguard.libraries import experiments, learner_packages
from nbguard.training.prediction.cell import FEW, GOES_ON, REACHED, CellFit, Loops, MarkedLoop, as_function
from nbguard.training.prediction.fits.first_batch import first_batch
from nbguard.training.prediction.fits.loop_fit import LoopSource, few, goes_on, is_tracing
from nbguard.training.prediction.fits.sources import source_of
from nbguard.training.prediction.predict import of_fits, predict_source
from nbguard.training.prediction.prediction import CellPrediction, GpuComparison, PredictedFit
from nbguard.training.prediction.script_source import is_installed, is_script, parsed

_GIVEN = ("model", "train_dataloaders")
"""The first arguments of Lightning's `Trainer.fit`."""
_AFTER = "the script's work after this fit is not counted"


def predict_script(
    file: str,
    gpus: Sequence[str | None] = (None,),
    settings: str | None = None,
    batch_size: int | None = None,
    arguments: Sequence[str] = (),
    *,
    largest: bool = False,
) -> CellPrediction | GpuComparison:
    """Return the memory of the first fit of a script: of a Learner, of a Trainer, or of a loop that trains.

    Everything before the fit runs as ever, with `__name__ == "__main__"`: it makes the data and the model. The fit does not.
    A loop may stand in a function, and in a file beside the script; its calls are followed, its validation too.

    Args:
        file: a path.
        gpus: one or several, each as of `predict`.
        settings: as of `predict`.
        batch_size: as of `predict`.
        arguments: of the script, as they would stand on the command line.
        largest: as of `predict`.

    Raises:
        NbguardError: the file cannot be read, is no Python, fails before its fit, or has none that can be predicted.
    """
    path = Path(file)
    tree = parsed(path)
    script = Script(path, tree)
    with _as_main(path, arguments), script.marks():
        fits = script.run()
        predictions = [
            predict_source(fit.source, gpu=gpu, settings=settings, batch_size=batch_size, code=fit.code, largest=largest)
            for gpu in gpus
            for fit in fits
        ]
    if not fits:
        raise UnpredictableError(
            f"{file} starts no fit that can be predicted; it has no fit of a Learner or Trainer and no loop with backward()"
        )
    predictions = [replace(each, assumptions=(*each.assumptions, _AFTER)) for each in predictions]
    predicted = [
        PredictedFit(text=fit.text, prediction=found) for fit, found in zip([*fits] * len(gpus), predictions, strict=True)
    ]
    return of_fits("the script ran up to its fit; the fit itself did not run", predicted, gpus)


class Script:
    """A script that runs up to its first fit, which is noted to be predicted, or is where it stops and nothing else."""

    def __init__(self, path: Path, tree: ast.Module, *, predicts: bool = True) -> None:
        self._path, self._tree, self._predicts = path, tree, predicts
        self._fits: list[CellFit] = []
        self._loops = Loops.of(tree, path.resolve().parent)

    @contextmanager
    def marks(self) -> Iterator[None]:
        """Return a context for running marked code, where the files beside the script are marked when they are imported."""
        finder = _Finder(self._loops)
        with ExitStack() as patched:
            for name, value in ((REACHED, self._reached), (FEW, few), (GOES_ON, goes_on)):
                patched.enter_context(_replaced(builtins, name, value))
            sys.meta_path.insert(0, finder)
            patched.callback(sys.meta_path.remove, finder)
            yield

    def run(self) -> list[CellFit]:
        """Return the fits that the script reaches.

        Raises:
            UnpredictableError: it does not get there, or its fit cannot be predicted.
        """
        namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(self._path), "__builtins__": builtins}
        process = multiprocessing.process.BaseProcess
        with ExitStack() as patched:
            patched.enter_context(_replaced(torch.Tensor, "backward", _refused_backward))
            patched.enter_context(_replaced(process, "start", self._started(process.start)))
            try:
                self._execute(namespace, patched, _statements(self._marked))
            except ReachedError:
                pass
            except NbguardError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the script raises is the reason
                if not self._fits:
                    reason = in_one_line(error)
                    raise UnpredictableError(f"{self._path} fails before its fit ({reason})") from None
            except SystemExit as error:
                if not self._fits:
                    raise UnpredictableError(f"{self._path} ends before its fit (exit {error.code})") from None
        return self._fits

    @contextmanager
    def executed(self, namespace: dict[str, Any]) -> Iterator[str]:
        """Run the script as a module up to its first fit; give that fit's place, empty where there is none.

        Until the context ends no fit starts, either: it raises a ReachedError.
        """
        process, stopped = multiprocessing.process.BaseProcess, ""
        with self.marks(), ExitStack() as patched:
            patched.enter_context(_replaced(torch.Tensor, "backward", _stopping("backward()")))
            patched.enter_context(_replaced(process, "start", self._started(process.start)))
            try:
                self._execute(namespace, patched, self._marked)
            except ReachedError as reached:
                stopped = str(reached)
            yield stopped

    @property
    def _marked(self) -> list[ast.stmt]:
        return self._loops.mark(self._tree, str(self._path)).body

    def _execute(self, namespace: dict[str, Any], patched: ExitStack, statements: Iterable[ast.stmt]) -> None:
        wanted = [(module, each.name, each.fit) for each in experiments() if each.fit for module in each.loops]
        for statement in statements:
            exec(compile(ast.Module([statement], []), str(self._path), "exec"), namespace)  # noqa: S102 - the user's script, as asked
            for module, name, method in tuple(wanted):
                if module in sys.modules:
                    kind = getattr(sys.modules[module], name)
                    instead = _noting(self._fits, method) if self._predicts else _stopping(f"{method}() of {name}")
                    patched.enter_context(_replaced(kind, method, instead))
                    wanted.remove((module, name, method))

    def _reached(self, number: int, outer: dict[str, Any], inner: dict[str, Any]) -> None:
        """Note the loop that the script has reached, and end it; in a trace of that loop go on."""
        if is_tracing():
            return
        loop = self._loops.marked[number]
        if not self._predicts:
            raise ReachedError(f"line {loop.line}: {loop.text:.80}")
        source = LoopSource.of(_as_step(loop, {**outer, **inner} if inner is not outer else outer))
        self._fits.append(CellFit(text=f"line {loop.line}: {loop.text:.80}", source=source))
        raise ReachedError

    def _started(self, former: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement that starts processes that load data, and refuses those that run the user's functions."""

        def start(process: Any) -> Any:
            code: CodeType | None = getattr(process._target, "__code__", None)
            if code is not None and _is_beside(self._loops.folder, Path(code.co_filename)):
                if not self._predicts:
                    raise ReachedError(f"a separate process, {code.co_name}()")
                raise UnpredictableError(f"the script trains in separate processes ({code.co_name}()): predict it in one")
            return former(process)

        return start


def _is_beside(folder: Path, file: Path) -> bool:
    """Say whether a file is a script's or beside it, and no installed package's."""
    return folder in file.resolve().parents and not is_installed(file)


def _as_step(loop: MarkedLoop, namespace: dict[str, Any]) -> Callable[[], None]:
    try:
        function = as_function(loop.statements, namespace, name=loop.function or "script", file=loop.file)
    except SyntaxError as error:
        raise UnpredictableError(f"line {loop.line}: {loop.text} cannot be taken out of its function: {error.msg}") from None
    if function.__code__.co_flags & (0x20 | 0x80 | 0x200):  # a generator, a coroutine, both
        raise UnpredictableError(
            f"line {loop.line}: {loop.text} yields or awaits: predict its body by nbguard.predict(step, batch)"
        )
    return function


class _Finder:
    """Marks the loops of the files beside a script when they are imported."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module is, if it is beside the script."""
        spec = PathFinder.find_spec(name, path, target)
        file = Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
        if spec is None or file is None or not _is_beside(self._loops.folder, file):
            return None
        spec.loader = _Loader(spec.name, str(file), self._loops)
        return spec


class _Loader(SourceFileLoader):
    """Compiles a file with its loops marked, and keeps no byte code of it."""

    def __init__(self, name: str, path: str, loops: Loops) -> None:
        super().__init__(name, path)
        self._loops = loops

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the interface's
        """Return the code of the marked file."""
        tree = ast.parse(Path(self.path).read_text(encoding="utf-8"))
        code: CodeType = compile(self._loops.mark(tree, self.path), self.path, "exec")
        return code


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a script, those below `if __name__ == "__main__":` among them."""
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in {n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)}:
            yield from statement.body
        else:
            yield statement


def _noting(fits: list[CellFit], method: str) -> Callable[..., None]:
    def fit(fitted: Any, *args: Any, **kwargs: Any) -> None:
        """Note the fitted object and end the script; `fine_tune` goes on to its second fit."""
        caller: Any = sys._getframe(1)
        own = (*learner_packages(), "fastcore")
        while caller is not None and str(caller.f_globals.get("__name__", "")).partition(".")[0] in own:
            if caller.f_code.co_name == "fine_tune":
                stages.append("freeze" if not stages else "unfreeze")  # the model is examined when both have been reached
            caller = caller.f_back
        line = "" if caller is None else f"line {caller.f_lineno}: "
        if "lightning" in type(fitted).__module__:
            module, loader = (args[place] if len(args) > place else kwargs.get(name) for place, name in enumerate(_GIVEN))
            if not isinstance(loader, torch.utils.data.DataLoader):
                raise UnpredictableError(
                    f"{line}fit() is given no loader of PyTorch's: predict it by nbguard.predict(model, batch)"
                )
            source = source_of(module, first_batch(loader), None)
        else:
            source = source_of(fitted, None, None)
        name = type(fitted).__name__
        if stages:
            text = f"{line}fine_tune() of {name}, after {stages[-1]}()"
            fits.append(CellFit(text=text, source=source, code=f"learn.{stages[-1]}()"))
        else:
            fits.append(CellFit(text=f"{line}{method}() of {name}", source=source))
        if stages != ["freeze"]:
            raise ReachedError

    stages: list[str] = []
    return fit


def _stopping(what: str) -> Callable[..., None]:
    def fit(*_: Any, **__: Any) -> None:
        """End the script at the line, outside of libraries, that starts the fit."""
        caller: Any = sys._getframe(1)
        while caller is not None and is_installed(Path(caller.f_code.co_filename)):
            caller = caller.f_back
        raise ReachedError(what if caller is None else f"line {caller.f_lineno}: {what}")

    return fit


def _refused_backward(*_: Any, **__: Any) -> None:
    raise UnpredictableError("the script trains outside any visible loop; predict it there with nbguard.predict(step, batch)")


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    is_own = name in vars(owner)
    former = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, former)
        else:
            delattr(owner, name)


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Let the script find itself, its arguments, and the modules beside it, as if Python ran it."""
    former = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(path), *arguments], [os.fspath(path.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = former


# --- The subject of `nbguard doctor MODULE:NAME`: a Learner, or a model with a batch, that a script makes before its first
# fit.


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The object that a target stands for."""

    subject: Any  # a Learner or a model
    batch: Any = None  # of a function that returns (model, batch)
    stopped: str = ""  # the fit at which the script was stopped; empty if it has none


def made_by(target: str) -> Made:
    """Return the object of `module:name`; a function is called without arguments. No fit is run.

    Raises:
        UndiagnosableError: there is no such module or name, or it raised an error when it was run.
    """
    name, _, attribute = target.partition(":")
    name = name.removesuffix(".py")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or not is_script(spec):
            return _made(importlib.import_module(name), attribute, "")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        path = Path(str(spec.origin))
        with Script(path, parsed(path), predicts=False).executed(vars(module)) as stopped:
            if stopped and attribute not in vars(module):
                raise UndiagnosableError(f"{target} is not made before the script's first fit ({stopped}): make it earlier")
            return _made(module, attribute, stopped)
    except ReachedError as reached:
        raise UndiagnosableError(f"{target} fits before it returns ({reached}): name a function that only makes it") from None
    except NbguardError:
        raise
    except (Exception, SystemExit) as error:
        reason = in_one_line(error)
        raise UndiagnosableError(f"{target} cannot be made: {reason}") from error


def _made(module: types.ModuleType, attribute: str, stopped: str) -> Made:
    made = getattr(module, attribute)
    if isinstance(made, types.FunctionType):
        made = made()
    subject, batch = made if type(made) is tuple and len(made) == 2 else (made, None)
    return Made(subject=subject, batch=batch, stopped=stopped)
