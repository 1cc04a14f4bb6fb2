"""The subject of a diagnosis, which is a model with the batch, the loss and the optimizer of one training step."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nbguard.errors import UndiagnosableError
from nbguard.memory.core.advice import diagnose
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of
from nbguard.memory.scan.learners import is_learner
from nbguard.training.doctor.analysis.diagnosis import variable_checks
from nbguard.training.doctor.environment import environment_facts

# --- PyTorch, imported for a diagnosis in a shell.


def import_torch(*, whole: bool) -> None:
    """Import PyTorch if it is installed; not where the checks name a setting that aborts the process at its import.

    Args:
        whole: whether more than the facts of the environment is asked. Its compiled part has these, in a third of the time.
    """
    checks = variable_checks(environment_facts())
    if any(finding.severity == "problem" for check in checks for finding in check.findings):
        return
    with contextlib.suppress(ModuleNotFoundError):
        if whole or "torch" in sys.modules or not _import_compiled_part():
            importlib.import_module("torch")


def _import_compiled_part() -> bool:
    """Import a `torch` of nothing but its versions and its compiled part; say whether that could be done.

    The process can do nothing else with PyTorch afterwards: a compiled part is imported once.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise ModuleNotFoundError
    torch: Any = importlib.util.module_from_spec(spec)
    sys.modules["torch"] = torch
    try:
        torch.version = importlib.import_module("torch.version")
        torch._C = compiled = importlib.import_module("torch._C")
        torch.__version__ = torch.version.__version__
        torch.get_num_threads = compiled.get_num_threads
        torch.get_float32_matmul_precision = compiled._get_float32_matmul_precision
        torch.cuda = SimpleNamespace(is_initialized=bool, _is_in_bad_fork=getattr(compiled, "_cuda_isInBadFork", bool))
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSubject:
    """The user's own objects, held as long as a diagnosis runs and no longer."""

    model: Any  # a torch module, without the wrapper of a distributed job
    name: str  # class of the Learner and of the model, for people
    learn: Any = None  # the fastai Learner, if it is one
    batch: Any = None  # given by the user; None if one is to be taken from the loader
    loader: Any = None  # training loader; None if none is known
    loss: Callable[..., Any] | None = None  # of prediction and targets; None if the outputs' sum stands for it
    optimizer: Any = None  # torch's or fastai's; None if none was given, or none was made yet
    is_compiled: bool = False  # whether `torch.compile` has wrapped the model, which is tried without it


def subject_of(obj: Any, batch: Any = None, loss: Any = None, optimizer: Any = None) -> TrialSubject:
    """Return the subject of trials for a Learner or a module.

    Raises:
        UndiagnosableError: it is neither.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise UndiagnosableError("PyTorch is not imported in this kernel, so there is no model to try")
    if is_learner(obj):
        model = attribute_of(obj, "model")
        return TrialSubject(
            model=_unwrapped(torch, model),
            is_compiled=_is_compiled(model),
            name=f"{type(obj).__name__} of {type(_original(model)).__name__}",
            learn=obj,
            batch=batch,
            loader=_training_loader(obj),
            loss=loss if loss is not None else attribute_of(obj, "loss_func"),
            optimizer=optimizer if optimizer is not None else attribute_of(obj, "opt"),
        )
    if torch.nn.Module not in mro_of(type(obj)):
        raise UndiagnosableError(
            f"this {type(obj).__name__} is neither a Learner nor a model: name one, as in  " + diagnose().command
        )
    return TrialSubject(
        model=_unwrapped(torch, obj),
        is_compiled=_is_compiled(obj),
        name=type(_original(obj)).__name__,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
    )


def fit_device(subject: TrialSubject) -> Any:
    """Return the torch device that the fit of a Learner would move its model to, namely its DataLoaders' device.

    None where there is no Learner, or its DataLoaders name none: the model is tried where it is.
    """
    torch: Any = sys.modules["torch"]
    loaders = attribute_of(subject.learn, "dls") if subject.learn is not None else None
    found = attribute_of(loaders, "_device")
    if found is None:  # a pair of loaders that were put together: fastai asks the training loader
        found = attribute_of(subject.loader, "_device")
    return None if found is None else torch.device(found)


def _is_compiled(model: Any) -> bool:
    """Say whether `torch.compile` has wrapped a model, or `Module.compile` has compiled its calls."""
    return _original(model) is not model or attribute_of(model, "_compiled_call_impl") is not None


def _original(model: Any) -> Any:
    """Return the model that `torch.compile` has wrapped; any other as it is."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and dynamo.OptimizedModule in mro_of(type(model)):
        return _original(model._modules["_orig_mod"])
    return model


def _unwrapped(torch: Any, model: Any) -> Any:
    """Return the module inside of a wrapper that hands its calls on to several devices or ranks.

    Raises:
        UndiagnosableError: the module cannot be run on copies of its parameters.
    """
    if torch.nn.Module not in mro_of(type(model)):
        raise UndiagnosableError(f"the Learner's model is a {type(model).__name__}, no torch module")
    model = _original(model)
    names = {base.__name__ for base in mro_of(type(model))}
    if names & {"DistributedDataParallel", "DataParallel"}:
        return _original(model.module)
    if "FullyShardedDataParallel" in names or "FSDPModule" in names:
        raise UndiagnosableError("a sharded model (FSDP) has no whole parameters here: try it before it is sharded")
    if "ScriptModule" in names:
        raise UndiagnosableError("a ScriptModule runs without Python: try the model that it was made of")
    return model


def _training_loader(learn: Any) -> Any:
    """Return the first loader of a Learner's; None if it has none. `dls.train` would be code of fastai's."""
    loaders = attribute_of(attribute_of(learn, "dls"), "loaders")
    return loaders[0] if type(loaders) is list and loaders else None
