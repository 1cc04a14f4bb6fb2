"""The subject of `nbguard doctor MODULE:NAME`: a Learner, or a model with a batch, that a script makes before its first fit."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError, ReachedError, UndiagnosableError, in_one_line
from nbguard.training.prediction.code.script import Script, is_installed, parsed


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
        if spec is None or not str(spec.origin).endswith(".py") or is_installed(Path(str(spec.origin))):
            return _made(importlib.import_module(name), attribute, "")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        path = Path(str(spec.origin))
        with Script(path, parsed(path), foresees=False).executed(vars(module)) as stopped:
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
