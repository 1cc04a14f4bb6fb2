"""A thread whose tensors without data stand for a GPU's, by modes, kernels and methods of torch's, and that writes no file."""

from __future__ import annotations

import builtins
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import starmap
from types import ModuleType
from typing import Any
from weakref import WeakMethod

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.libraries import own_optimizers
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.scan.heap.kinds import loaded_class
from nbguard.memory.scan.storage_events import StorageMode
from nbguard.training.prediction.emulation import recorder as composites
from nbguard.training.prediction.emulation.operators import Autocast, OperatorMode
from nbguard.training.prediction.emulation.recorder import RecordingDevice
from nbguard.training.prediction.fits.batches import moved
from nbguard.training.prediction.hardware import Gpu, WorkspaceCounts
from nbguard.training.prediction.prediction import FitPhase

# --- A number read from a tensor without data. It may be kept, added up and shown, but decisions by it are noted.


_BINARY = ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv")
_ARITHMETIC = (*(f"__{side}{name}__" for name in _BINARY for side in ("", "r")), "__neg__", "__abs__")
_DECISIONS = ("__bool__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


class UnknownFloat(float):
    """A float whose value is not known. `note` is called when something is decided by it."""

    __slots__ = ("note",)
    note: Callable[[], None]

    @classmethod
    def of(cls, value: float, note: Callable[[], None]) -> UnknownFloat:
        """Return `value` as such a number."""
        own = cls(value)
        own.note = note
        return own

    __hash__ = float.__hash__


def _arithmetic(name: str) -> Callable[..., Any]:
    former = getattr(float, name)

    def method(self: UnknownFloat, *others: Any) -> Any:
        out = former(self, *others)
        return UnknownFloat.of(out, self.note) if type(out) is float else out

    return method


def _decision(name: str) -> Callable[..., Any]:
    former = getattr(float, name)

    def method(self: UnknownFloat, *others: Any) -> Any:
        self.note()
        return former(self, *others)

    return method


for _name in _ARITHMETIC:
    setattr(UnknownFloat, _name, _arithmetic(_name))
for _name in _DECISIONS:
    setattr(UnknownFloat, _name, _decision(_name))


# --- Disk writes that are suppressed while tracing a fit: checkpoints, pictures, logs.


def _nothing_of_writes(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _opened(former: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Open a file to read; writes go nowhere."""
    return former(os.devnull if set(mode) & set("wax+") else file, mode.replace("x", "w"), *args, **kwargs)


WRITES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch, "save", _nothing_of_writes),
    (builtins, "open", _opened),
    *((os, name, _nothing_of_writes) for name in ("remove", "unlink", "rename", "replace", "mkdir", "makedirs", "rmdir")),
    *((shutil, name, _nothing_of_writes) for name in ("copy", "copy2", "copyfile", "copytree", "move", "rmtree")),
)
"""(owner, name, replacement in a trace); the replacement is called with the original function and its arguments."""


_TorchOutOfMemoryError: Any = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError
_ENDLESS = 1 << 50


class PredictedOutOfMemoryError(_TorchOutOfMemoryError):  # type: ignore[misc]
    """The modelled GPU has no room for a request of the traced fit."""


class _OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """Makes tensors on the meta device that code asks the fit's device for by name: CUDA, and the device of its models.

    `item()` is noted by the decisions made with it. `cpu()` is the host always. A fit whose models are on the host has no
    device to name: a tensor of the host that meets the model's is taken for one on the device, and its line is noted.
    """

    def __init__(self, operators: OperatorMode, device: str) -> None:
        super().__init__()
        self._operators = operators
        self._kinds = ("cuda", device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return moved(args[0]).to("meta")
        if func is torch.Tensor.to:
            device = args[1] if len(args) > 1 else kwargs.get("device")
            is_device = self._is_device(device)
            if is_device or (isinstance(device, torch.device) and device.type == "meta"):
                args = (moved(args[0]), *args[1:])
            if is_device and len(args) > 1:
                args = (args[0], "meta", *args[2:])
        if func is torch.Tensor.__setitem__ and args[0].is_meta and type(args[2]) in (bool, int, float):
            value = torch.scalar_tensor(args[2], dtype=args[0].dtype, device="cpu")  # as for a tensor on CUDA
            return func(args[0], args[1], value)
        if func in (torch.Tensor.numpy, torch.Tensor.tolist) and args[0].is_meta:
            args = (torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:])
        if func is torch.Tensor.__format__ and args[0].is_meta:  # a number that is shown
            return format(torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:])
        if func is torch.Tensor.item and args[0].is_meta and args[0].is_floating_point():
            return UnknownFloat.of(1.0, self._operators.note_read)
        if self._is_device(kwargs.get("device")):
            kwargs = kwargs | {"device": "meta"}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "cpu" not in self._kinds or "meta" not in str(error) or "device" not in str(error):
                raise
        self._operators.note_host()
        return func(*map(_on_meta, args), **{name: _on_meta(value) for name, value in kwargs.items()})

    def _is_device(self, device: Any) -> bool:
        """Say whether the fit's own device is meant. Code of torch's that says "cpu" means the host, as its optimizers do."""
        kind = device.partition(":")[0] if isinstance(device, str) else getattr(device, "type", None)
        if kind != "cpu":
            return kind in self._kinds
        return "cpu" in self._kinds and not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")


_NO_WORKSPACES = WorkspaceCounts()


def _on_meta(value: Any) -> Any:
    """Return an argument with its tensors of the host on the meta device, but for numbers, which any device takes."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_on_meta, value))
    return moved(value).to("meta") if isinstance(value, torch.Tensor) and not value.is_meta and value.dim() else value


_UNOPENED = {"current_device": 0, "is_bf16_supported": True}
"""A Learner's questions at the start of a fit, with the answers while CUDA is not initialised, since asking would do that."""


_EFFECTS = ("empty_cache", "reset_peak_memory_stats", "synchronize")
"""Functions of `torch.cuda` that act on the device of this process, which is not the trace's."""


class Emulation(AbstractContextManager["Emulation"]):
    """Meta tensors of this thread live on a modelled GPU while it is entered. Other threads go on as ever.

    Args:
        gpu: the GPU. Its context is not the allocator's.
        settings: of the allocator.
        reserve: bytes of the device that must stay free.
        start: puts the empty model of the allocator into another state; None for an empty device.
        workspaces: those of cuBLAS that are there already.
        device: kind of the device of the fit's models; on a machine without a GPU that is the host.
    """

    def __init__(
        self,
        gpu: Gpu,
        settings: AllocatorSettings,
        reserve: int = 0,
        start: Callable[[CachingAllocator], None] | None = None,
        workspaces: WorkspaceCounts = _NO_WORKSPACES,
        device: str = "cuda",
    ) -> None:
        self.device: RecordingDevice = RecordingDevice(
            gpu.capacity or _ENDLESS,
            gpu.context + reserve,
            settings,
            None,
            str(torch.__version__).partition("+")[0],
            _refused,
        )
        if start is not None:
            start(self.device.model)
            self.device.model.driver.used += self.device.model.reserved  # type: ignore[attr-defined] # a SimulatedDriver's
            self.device.begin()
        self.storages: StorageMode = StorageMode(self.device, "meta")
        self.operators: OperatorMode = OperatorMode(self.device, gpu, workspaces)
        self._gpu, self._kind = gpu, device
        self._autocast = Autocast()
        self._thread = 0
        self._open = ExitStack()

    def __enter__(self) -> Emulation:
        self._thread = threading.get_ident()
        with suppress(ImportError):  # meta kernels import it: in the trace it would take the replacements for torch's own
            pass
        with ExitStack() as stack:
            stack.enter_context(_same_autocast())
            self._register(stack)
            replaced: dict[int, tuple[Any, Any]] = {}
            stack.callback(_put_back, replaced, frozenset(sys.modules))
            for owner, name, value in self._replacements():
                former = getattr(owner, name)
                replaced[id(value)] = value, former
                stack.callback(setattr, owner, name, former)
                setattr(owner, name, value)
            stack.callback(self.storages.leave)
            self._follow_steps(stack)
            self.storages.__enter__()
            stack.enter_context(self.operators)
            stack.enter_context(_OnMeta(self.operators, self._kind))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def settle(self) -> None:
        """Free the dead storages, so that the figures are current."""
        self.storages.settle()
        self.device.settle()

    def _register(self, stack: ExitStack) -> None:
        """Put in the kernels of operators that meta tensors would decompose, and CUDA's do not."""
        stack.callback(self._autocast.remove)
        self._autocast.install()
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        note, autocast = WeakMethod(self.operators.note_layers), self._autocast  # torch keeps registrations for good
        for operator, kernel in composites.kernels(self._gpu, lambda nbytes: note()(nbytes), lambda: autocast.dtype):  # type: ignore[misc]
            library.impl(operator, kernel, composites.KEY)

    def _replacements(self) -> Iterable[tuple[Any, str, Any]]:
        """Return (owner, name, value) of methods that do something else in this thread meanwhile."""
        autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.GradScaler
        yield autocast, "__init__", self._here(_init_autocast, autocast.__init__)
        yield autocast, "__enter__", self._here(self._enter_autocast, autocast.__enter__)
        yield autocast, "__exit__", self._here(self._leave_autocast, autocast.__exit__)
        yield scaler, "__init__", self._here(_init_scaler, scaler.__init__)
        yield scaler, "_maybe_opt_step", self._here(_step, scaler._maybe_opt_step)
        for name in _EFFECTS:
            yield torch.cuda, name, self._here(_nothing, getattr(torch.cuda, name))
        for name, unopened in _UNOPENED.items():
            yield torch.cuda, name, self._here(_without_opening(unopened), getattr(torch.cuda, name))
        yield torch.utils.checkpoint, "_infer_device_type", self._kind_of_device(torch.utils.checkpoint._infer_device_type)
        yield torch.nn.Module, "__call__", self._called(torch.nn.Module.__call__)
        for owner, name, value in WRITES:
            yield owner, name, self._here(value, getattr(owner, name))
        for own in filter(None, starmap(loaded_class, own_optimizers())):
            yield own, "step", self._here(self._own_step, own.step)  # type: ignore[attr-defined]
        for module in _with_devices():
            for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
                if supported := getattr(module, name, None):
                    yield module, name, _also_meta(supported)

    def _follow_steps(self, stack: ExitStack) -> None:
        """Note when an optimizer of torch's steps in this thread."""

        def note(is_stepping: bool) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if threading.get_ident() == self._thread:
                    self.device.is_stepping = is_stepping
                    self.device.steps += not is_stepping

            return hook

        stack.callback(register_optimizer_step_pre_hook(note(True)).remove)
        stack.callback(register_optimizer_step_post_hook(note(False)).remove)

    def _own_step(self, former: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.device.steps += 1
        with self.device.making(None, FitPhase.STEP):
            return former(optimizer, *args, **kwargs)

    def _called(self, former: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a module and notes it."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return former(module, *args, **kwargs)
            self.device.enter_module(module)
            try:
                return former(module, *args, **kwargs)
            finally:
                self.device.leave_module()

        return call

    def _here(self, replacement: Callable[..., Any], former: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return former(*args, **kwargs)
            return replacement(former, *args, **kwargs)

        return method

    def _kind_of_device(self, former: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that tells a checkpoint to restore CUDA's autocast, as meta tensors stand for CUDA's."""

        def kind(*args: Any) -> str:
            own_kind: str = former(*args)
            return "cuda" if own_kind == "meta" and threading.get_ident() == self._thread else own_kind

        return kind

    def _enter_autocast(self, former: Callable[..., Any], context: Any) -> Any:
        if context.device == "cuda":
            self._autocast.enter(context.fast_dtype if context._enabled else None)
        return former(context)

    def _leave_autocast(self, former: Callable[..., Any], context: Any, *error: Any) -> Any:
        if context.device == "cuda":
            self._autocast.leave()
        return former(context, *error)


def _put_back(replaced: dict[int, tuple[Any, Any]], loaded: frozenset[str]) -> None:
    """Put the functions of torch's and Python's own into modules that were imported in a trace, and took their replacements.

    Args:
        replaced: (replacement, original) by the id of the first.
        loaded: names of the modules that were there before.
    """
    for name in sys.modules.keys() - loaded:
        space = getattr(sys.modules[name], "__dict__", {})
        for own, value in tuple(space.items()):
            if id(value) in replaced:
                space[own] = replaced[id(value)][1]


@contextmanager
def _same_autocast() -> Iterator[None]:
    """Leave autocast in this thread as it was: a fit that ends in the middle of a batch does not leave it by itself."""
    kinds = ("cpu", "cuda")
    nesting, caches = torch.autocast_increment_nesting() - 1, torch.is_autocast_cache_enabled()
    torch.autocast_decrement_nesting()
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    try:
        yield
    finally:
        now = torch.autocast_increment_nesting()
        while now > nesting:
            now = torch.autocast_decrement_nesting()
        for kind, is_enabled, dtype in states:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches)
        if not nesting:
            torch.clear_autocast_cache()


def _init_autocast(
    former: Callable[..., Any],
    context: Any,
    device_type: str,
    dtype: Any = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Make a context for CUDA without asking whether there is any."""
    former(context, device_type, dtype, enabled and device_type != "cuda", cache_enabled)
    context._enabled = enabled if device_type == "cuda" else context._enabled


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _without_opening(answer: Any) -> Callable[..., Any]:
    """Return a function that gives CUDA's answer where it is initialised, and else this one."""

    def ask(former: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return former(*args, **kwargs) if torch.cuda.is_initialized() else answer

    return ask


def _init_scaler(former: Callable[..., Any], scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
    former(scaler, "meta" if device == "cuda" else device, *args, **kwargs)


def _step(_: Callable[..., Any], __: Any, optimizer: Any, ___: Any, *args: Any, **kwargs: Any) -> Any:
    """Step: gradients are finite, as they are in a fit that goes on."""
    return optimizer.step(*args, **kwargs)


def _with_devices() -> list[ModuleType]:
    """Return torch's modules that have the lists of devices with kernels for many tensors at once."""
    names = [name for name in sys.modules if name.startswith(("torch.optim", "torch.utils._foreach_utils"))]
    return [module for name in names if (module := sys.modules.get(name)) is not None]


def _also_meta(supported: Callable[..., Any]) -> Callable[..., Any]:
    def devices(*args: Any, **kwargs: Any) -> Any:
        return [*supported(*args, **kwargs), "meta"]

    return devices


def _refused(error: SimulatedOutOfMemoryError, asked: int) -> Exception:
    return PredictedOutOfMemoryError(f"predicted: {asked} bytes asked for, {error.free} bytes free on the device")
