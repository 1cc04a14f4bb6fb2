"""The settings and seeds of a fit, with model, optimizer by group, callbacks and loaders, read from attributes."""

from __future__ import annotations

import functools
import os
import pathlib
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbguard.errors import RunRecordError
from nbguard.memory.core.advice import RECORD_RUN
from nbguard.memory.scan.devices.generators import LibraryGenerators, is_in_use
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, name_of
from nbguard.memory.scan.learners import is_learner
from nbguard.training.runs.analysis.cell_seeds import seeds_in
from nbguard.training.runs.analysis.record import NEVER_SET
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.fingerprint import WHOLE, bytes_hash, tensors_hash, texts_hash
from nbguard.units import format_bytes

# --- Seeds as they were set, and the state of each generator of random numbers. Nothing is drawn


_DEFAULT = 67280421310721
"""`c10::default_rng_seed_val`: the seed of a device's generator where none was set."""
_LARGEST = 2**32
"""Numbers from here on are none that people choose: torch's own generator begins with one that the system draws."""


def collect_seeds(facts: FactCollector, cells: Sequence[str] | None) -> None:
    """Collect the seeds: torch tells its own; Python and numpy keep none, so that only the cells tell of it."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        seed = torch.initial_seed()
        facts.add("seeds", "torch", seed if is_chosen(seed) else NEVER_SET)
        if not is_chosen(seed):
            facts.add("generators", "torch, seed that the system drew", seed)
        if is_in_use(torch.cuda):
            facts.attempt("seeds", "cuda", lambda: facts.add("seeds", "cuda", torch.cuda.initial_seed()))
    fixed = os.environ.get("PYTHONHASHSEED", "") if not sys.flags.hash_randomization else ""
    facts.add("seeds", "hash seed", fixed or "random in each process")
    if cells is None:
        facts.miss("seeds", "calls", "without IPython the code that sets seeds is not known")
        return
    calls = [call.text for call in seeds_in(cells).seeds]
    unset = torch is None or not is_chosen(torch.initial_seed())
    facts.add("seeds", "calls", "; ".join(calls) or ("none" if unset else "none in a cell"))


def is_chosen(seed: int) -> bool:
    """Return whether somebody set this seed."""
    return seed != _DEFAULT and abs(seed) < _LARGEST


def collect_generators(facts: FactCollector) -> None:
    """Collect a hash of the state of each generator of the libraries, of devices only where they are in use."""
    for name, state in LibraryGenerators().states:
        facts.attempt("generators", name, lambda name=name, state=state: facts.add("generators", name, _hash(state)))  # type: ignore[misc]


def generator_hash(state: Any) -> str:
    """Return a hash of the state of a generator, as the library gives it."""
    return _hash(state)


def _hash(state: Any) -> str:
    """Return a hash of a state: tuples of numbers, arrays and tensors of bytes."""
    return texts_hash(_parts(state))


def _parts(state: Any) -> list[str]:
    kind = type(state)
    if kind in (tuple, list):
        return [part for each in state for part in _parts(each)]
    if kind is dict:
        return [part for key in sorted(state) for part in (str(key), *_parts(state[key]))]
    torch: Any = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return [bytes_hash(state.numpy().tobytes())]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return [bytes_hash(state.tobytes())]
    return [repr(state)]  # a number or text of a library's own state


# --- Values of the user's as text: numbers, texts and containers of them. Anything else is named by its type only.


_ITEMS = 16
_DEPTH = 3
_LONGEST = 120


def text_of(value: Any, depth: int = _DEPTH) -> str:
    """Return a value as text. No code of the user's runs: objects but numbers, texts and containers become types."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return repr(value)
    if kind is str:
        return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
    if kind in (tuple, list) and depth:
        parts = [text_of(part, depth - 1) for part in value[:_ITEMS]]
        return f"({', '.join([*parts, *(['…'] if len(value) > _ITEMS else [])])})"
    if kind is dict and depth:
        parts = [f"{text_of(key, 0)}: {text_of(part, depth - 1)}" for key, part in list(value.items())[:_ITEMS]]
        return "{" + ", ".join([*parts, *(["…"] if len(value) > _ITEMS else [])]) + "}"
    return _number(value) or _function(value, depth) or _tensor(value) or _library(value) or f"<{name_of(kind)}>"


def _number(value: Any) -> str:
    """Return a number or text of a subclass, such as numpy's float64, by the base's own function; empty for anything else."""
    bases = mro_of(type(value))
    for base in (float, int, str):
        if base in bases:
            return str.__str__(value)[:_LONGEST] if base is str else base.__repr__(value)
    if issubclass(type(value), pathlib.PurePath) and type(value).__module__.startswith("pathlib"):
        return str(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and numpy.generic in bases and type(value).__module__ == "numpy":
        return repr(value.item())
    return ""


def _function(value: Any, depth: int) -> str:
    """Return the name of a function or class, or a partial's function with its keywords; empty for anything else."""
    kind = type(value)
    if kind is functools.partial:
        more = [f"{key}={text_of(part, depth - 1)}" for key, part in value.keywords.items()] if depth else []
        return f"{text_of(value.func, 0)}({', '.join([*(text_of(part, 0) for part in value.args), *more])})"
    if kind in (types.FunctionType, types.BuiltinFunctionType):
        return str(value.__name__)
    if kind is types.MethodType:
        return _function(value.__func__, depth)
    return name_of(value) if type in mro_of(kind) else ""


def _tensor(value: Any) -> str:
    """Return a small tensor of the host's by its numbers, another one by its shape: to read from a device would wait for it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or (type(value) is not torch.Tensor and torch.Tensor not in mro_of(type(value))):
        return ""
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.detach()
        if plain.device.type == "cpu" and plain.numel() <= _ITEMS and plain.layout is torch.strided:
            return text_of(_rounded(plain.tolist()))
        return f"tensor of {tuple(plain.shape)} on {plain.device.type}"


def _rounded(value: Any) -> Any:
    if type(value) is list:
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if type(value) is float else value


def _library(value: Any) -> str:
    """Return torch's dtypes and devices as they are written; empty for anything else."""
    torch: Any = sys.modules.get("torch")
    return str(value) if torch is not None and type(value) in (torch.dtype, torch.device) else ""


def described(value: Any, limit: int = 8) -> str:
    """Return an object by its class and the arguments that it was made with, where it keeps them: `Resize(size=224)`.

    fastcore's `store_attr` keeps them by name; of a torchvision transform they are its attributes.
    """
    if type(value) in (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial):
        return text_of(value)
    stored = attribute_of(value, "__stored_args__")
    if type(stored) is not dict:
        torchs = type(value).__module__.startswith(("torchvision.", "torch.", "albumentations."))
        stored = _atoms(value) if torchs else {}
    arguments = [f"{name}={text_of(part, 2)}" for name, part in list(stored.items())[:limit] if type(name) is str]
    return f"{name_of(type(value))}({', '.join(arguments)})" if arguments else name_of(type(value))


def _atoms(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a library's that are numbers, texts or tuples of them."""
    from nbguard.memory.scan.heap.kinds import attributes_of

    own = attributes_of(value) or {}
    simple = (bool, int, float, str, tuple, list)
    return {
        name: part for name, part in own.items() if not name.startswith("_") and type(part) in simple and name != "training"
    }


# --- Settings and seeds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """The user's own objects."""

    learn: Any = None  # the Learner, if it is one
    model: Any = None  # torch module
    optimizer: Any = None  # torch's or a Learner's; None if none is known yet
    loaders: tuple[Any, ...] = ()  # the training one first

    @property
    def subject(self) -> str:
        """Return the classes of the Learner and the model."""
        names = [name_of(type(each)) for each in (self.learn, self.model) if each is not None]
        return " of ".join(names)


def ingredients_of(obj: Any, optimizer: Any = None, loaders: Sequence[Any] | Any = ()) -> Ingredients:
    """Return the ingredients of a Learner's or a model's fit.

    Raises:
        RunRecordError: it is neither.
    """
    given = tuple(loaders) if type(loaders) in (tuple, list) else () if loaders is None else (loaders,)
    if obj is None:
        return Ingredients(optimizer=optimizer, loaders=given)
    if is_learner(obj):
        own = attribute_of(attribute_of(obj, "dls"), "loaders")
        return Ingredients(
            learn=obj,
            model=attribute_of(obj, "model"),
            optimizer=optimizer if optimizer is not None else attribute_of(obj, "opt"),
            loaders=given or (tuple(own) if type(own) is list else ()),
        )
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.nn.Module not in mro_of(type(obj)):
        raise RunRecordError(
            f"this {name_of(type(obj))} is neither a Learner nor a model: name one, as in  " + RECORD_RUN.command
        )
    return Ingredients(model=obj, optimizer=optimizer, loaders=given)


LOADERS = ("training", "validation")
_GROUPS = 16
_NOT_SETTINGS = frozenset({"params", "initial_lr", "param_names"})
_MOST_BYTES = 256 * 1024**2
"""Most bytes of parameters whose weights are hashed; of each tensor above 16 MiB only pieces."""


def collect_model(facts: FactCollector, model: Any) -> None:
    """Collect the model's class, the shapes of its parameters, and a hash of its weights where they lie in host memory."""
    if model is None:
        facts.miss("model", "class", "no model was given")
        return
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    facts.add("model", "class", f"{type(model).__module__}.{name_of(type(model))}")
    facts.add("model", "parameters", sum(parameter.numel() for _, parameter in parameters))
    facts.add("model", "trainable", sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad))
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in (*parameters, *buffers)]
    facts.add("model", "structure", texts_hash([*shapes, *(name_of(type(module)) for module in model.modules())]))
    facts.add("model", "dtypes", ", ".join(sorted({str(tensor.dtype) for _, tensor in parameters})) or "none")
    facts.add("model", "device", ", ".join(sorted({tensor.device.type for _, tensor in parameters})) or "none")
    tensors = [tensor for _, tensor in (*parameters, *buffers)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if sum(min(tensor.numel() * tensor.element_size(), WHOLE) for tensor in tensors) > _MOST_BYTES:
        facts.miss("model", "weights", f"{format_bytes(size)} are too many to hash in a moment")
        return
    try:
        facts.add("model", "weights", tensors_hash(tensors))
    except ValueError as error:
        facts.miss("model", "weights", str(error))


def collect_learner(facts: FactCollector, learn: Any) -> None:
    """Collect a Learner's own settings: loss, optimizer, callbacks, number of epochs, mixed precision."""
    if learn is None:
        return
    for name, attribute in (("loss", "loss_func"), ("optimizer", "opt_func"), ("metrics", "metrics")):
        value = attribute_of(learn, attribute)
        inner = attribute_of(value, "items") if name == "metrics" else None
        texts = [described(each) for each in (inner if type(inner) is list else [value]) if each is not None]
        facts.add("hyper-parameters" if name != "metrics" else "place", name, ", ".join(texts) or "none")
    for name in ("lr", "wd", "moms", "wd_bn_bias", "train_bn", "n_epoch"):
        value = attribute_of(learn, name)
        if value is not None:
            facts.add("hyper-parameters", f"learner {name}", text_of(value))
    arch = attribute_of(learn, "arch")
    if arch is not None:
        facts.add("model", "architecture", text_of(arch))
    callbacks = _items(attribute_of(learn, "cbs"))
    shown = [described(each) for each in callbacks if not type(each).__module__.startswith("nbguard.")]
    facts.add("model", "callbacks", ", ".join(shown))
    half = next((each for each in callbacks if name_of(type(each)) in ("MixedPrecision", "NonNativeMixedPrecision")), None)
    mode = attribute_of(half, "amp_mode") if half is not None else None
    facts.add("precision", "mixed precision", "off" if half is None else getattr(mode, "value", None) or "on")


def collect_optimizer(facts: FactCollector, optimizer: Any) -> None:
    """Collect the settings of each group of an optimizer, torch's or a Learner's."""
    if optimizer is None:
        facts.miss("hyper-parameters", "groups", "there is no optimizer yet; a fit makes it")
        return
    inner = attribute_of(optimizer, "opt") or optimizer
    groups = attribute_of(inner, "param_groups")
    hypers = attribute_of(inner, "hypers") if groups is None else groups
    if type(hypers) not in (list, tuple) and (hypers := _items(hypers)) == []:
        facts.miss("hyper-parameters", "groups", f"a {name_of(type(optimizer))} keeps its settings in its own way")
        return
    facts.add("hyper-parameters", "groups", f"{len(hypers)} of {name_of(type(inner))}")
    for number, group in enumerate(hypers[:_GROUPS]):
        for name, value in dict.items(group):
            if type(name) is str and name not in _NOT_SETTINGS:
                facts.add("hyper-parameters", f"{name} of group {number}", text_of(value))


def collect_loaders(facts: FactCollector, ingredients: Ingredients) -> None:
    """Collect the settings of the loaders, their transforms, and where their own generators stand."""
    if not ingredients.loaders:
        facts.miss("loaders", "training", "no loader was given")
    for name, loader in zip(LOADERS, ingredients.loaders, strict=False):
        _loader(facts, name, loader)


def _loader(facts: FactCollector, name: str, loader: Any) -> None:
    stand_in = attribute_of(loader, "fake_l")
    inner = stand_in if stand_in is not None else loader
    size = attribute_of(loader, "bs") if stand_in is not None else attribute_of(loader, "batch_size")
    sampler = attribute_of(loader, "sampler")
    shuffles = attribute_of(loader, "shuffle") if stand_in is not None else _is_random(sampler)
    settings = {
        "batch size": size,
        "shuffles": shuffles,
        "drops last": attribute_of(loader, "drop_last"),
        "workers": attribute_of(inner, "num_workers"),
        "prefetch": attribute_of(inner, "prefetch_factor"),
        "pins memory": attribute_of(inner, "pin_memory"),
        "keeps workers": attribute_of(inner, "persistent_workers"),
    }
    for setting, value in settings.items():
        if value is not None:
            facts.add("loaders", f"{name} {setting}", text_of(value))
    if sampler is not None and stand_in is None:
        facts.add("loaders", f"{name} sampler", name_of(type(sampler)))
    for stage in ("after_item", "before_batch", "after_batch"):
        transforms = _items(attribute_of(attribute_of(loader, stage), "fs"))
        if transforms:
            facts.add("loaders", f"{name} {stage}", ", ".join(map(described, transforms)))
    transform = attribute_of(attribute_of(loader, "dataset"), "transform")
    if transform is not None:
        several = attribute_of(transform, "transforms")
        facts.add("loaders", f"{name} transform", ", ".join(map(described, several if type(several) is list else [transform])))
    own = attribute_of(loader, "rng")
    if random.Random in mro_of(type(own)):
        facts.add("generators", f"{name} loader", generator_hash(random.Random.getstate(own)))
    torch: Any = sys.modules["torch"]
    generator = attribute_of(inner, "generator")
    if type(generator) is torch.Generator:
        facts.add("generators", f"{name} loader, torch", generator_hash(generator.get_state()))


def _is_random(sampler: Any) -> bool | None:
    torch: Any = sys.modules["torch"]
    return None if sampler is None else torch.utils.data.RandomSampler in mro_of(type(sampler))


def _items(value: Any) -> list[Any]:
    """Return the items of a list, of fastcore's `L` or of a pipeline; an empty list of anything else."""
    if type(value) is list:
        return value
    inner = attribute_of(value, "items") if value is not None else None
    return inner if type(inner) is list else []
