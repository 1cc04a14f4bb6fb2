"""A model's surroundings: the transforms before it, and objects that `learn.export()` writes by name only."""

from __future__ import annotations

import dis
import inspect
import io
import pickle
import types
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from nbguard.libraries import learner_packages
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import attribute_of, attributes_of, mro_of, name_of, namespace_of
from nbguard.render.markup import line_words
from nbguard.training.doctor.analysis.export import BatchChange
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digests import tensors_in
from nbguard.training.doctor.determinism.seeds import loaders_of
from nbguard.training.doctor.export.failures import words_of
from nbguard.training.doctor.subject import TrialSubject

# --- Callbacks of a Learner that change the model's inputs or outputs, read from their code, which is not run.


_EVENTS = {"before_batch": ("xb", "x"), "after_pred": ("pred",)}
"""Events around the call of the model, and the Learner's attributes that they may change for it."""
_SETTERS = ("setattr", "__setattr__")
_UPDATE, _NAMESPACES = "update", ("__dict__", "vars")
"""Functions that bind an attribute by its name as a text, which no instruction shows."""
_ENDS = ("POP_TOP", "STORE_", "RETURN_", "FOR_ITER", "LIST_APPEND", "POP_JUMP")
"""Beginnings of the instructions at which a statement ended."""


def batch_changes(subject: TrialSubject) -> tuple[BatchChange, ...]:
    """Return the changes to inputs and outputs by callbacks that also run outside of training, without a library's own."""
    callbacks = attribute_of(subject.learn, "cbs") if subject.learn is not None else None
    items = attribute_of(callbacks, "items")
    return tuple(change for callback in (items if type(items) is list else ()) for change in _changes(callback))


def _changes(callback: Any) -> Iterator[BatchChange]:
    if (
        str(type(callback).__module__).partition(".")[0] in (*learner_packages(), "nbguard")
        or _value(callback, "run_valid") is False
    ):
        return
    for event, names in _EVENTS.items():
        function = _value(callback, event, of_class=True)
        code = inspect.unwrap(function).__code__ if isinstance(function, FunctionType) else None
        line = None if code is None else _writes(callback, code, names, set(), frozenset())
        if line is not None:
            yield BatchChange(callback=name_of(type(callback)), event=event, line=words_of(line))


def _value(callback: Any, name: str, *, of_class: bool = False) -> Any:
    own = None if of_class else attribute_of(callback, name)
    if own is not None:
        return own
    return next((namespace_of(cls)[name] for cls in mro_of(type(callback)) if name in namespace_of(cls)), None)


def _writes(
    callback: Any, code: CodeType, names: tuple[str, ...], seen: set[CodeType], texts: frozenset[str]
) -> tuple[str, int, str] | None:
    """Return the line at which code, or a method that it calls, binds one of the names, or writes into its object.

    `texts` are constants of its callers, which may be names that it is given.
    """
    if code in seen:
        return None
    seen.add(code)
    texts = texts.union(text for each in code.co_consts for text in _texts_of(each))
    number, reads, statement = code.co_firstlineno, False, _Statement()
    for instruction in dis.get_instructions(code):
        start = getattr(instruction, "line_number", instruction.starts_line)  # from Python 3.13 on by that name
        if type(start) is int and start != number:
            number, reads = start, False
        name = str(instruction.argval) if type(instruction.argval) is str else ""
        reads = reads or name in names
        is_in_place = name.endswith("_") and not name.endswith("__")
        is_binding = instruction.opname == "STORE_ATTR" and name in names
        is_written = reads and (is_in_place or instruction.opname == "STORE_SUBSCR")
        if is_binding or is_written:
            return code.co_filename, number, code.co_name
        if instruction.opname.startswith(_ENDS):
            if statement.sets_one_of(names, texts):
                return code.co_filename, statement.line, code.co_name
            statement = _Statement()
        else:
            statement.take(instruction, number, code)
    inner = [each for each in code.co_consts if type(each) is CodeType]  # comprehensions and functions inside
    methods = [_value(callback, name, of_class=True) for name in code.co_names]
    called = [inspect.unwrap(method).__code__ for method in methods if isinstance(method, FunctionType)]
    found = (_writes(callback, each, names, seen, texts) for each in (*inner, *called))
    return next((line for line in found if line is not None), None)


class _Statement:
    """The words of one statement so far: the name it sets by a function is a text among them, or is computed."""

    def __init__(self) -> None:
        self.line = 0  # of the function that sets
        self._words: set[str] = set()
        self._texts: list[str] = []  # in order: of `setattr` the first is the name, mostly

    def take(self, instruction: dis.Instruction, number: int, code: CodeType) -> None:
        """Take in the next instruction, which is on line `number`."""
        if instruction.opname == "KW_NAMES" and instruction.arg is not None:  # Python 3.11 and 3.12
            self._texts += _texts_of(code.co_consts[instruction.arg])
        elif instruction.opname == "LOAD_CONST":
            self._texts += _texts_of(instruction.argval)
        elif type(instruction.argval) is str:
            if instruction.argval in (*_SETTERS, _UPDATE):
                self.line = number
            self._words.add(instruction.argval)

    def sets_one_of(self, names: tuple[str, ...], texts: frozenset[str]) -> bool:
        """Say whether it sets an attribute of one of these names, or of a name that is none of its constants but of `texts`."""
        if _UPDATE in self._words and not self._words.isdisjoint(_NAMESPACES):
            return not set(self._texts).isdisjoint(names)
        if self._words.isdisjoint(_SETTERS):
            return False
        own = [text for text in self._texts if text != "learn"][:1]  # getattr(self, "learn") may come first
        return not (set(own) or texts).isdisjoint(names)


def _texts_of(constant: object) -> Iterator[str]:
    """Yield the texts of a constant: itself, or those of a tuple or set of constants."""
    if type(constant) is str:
        yield constant
    elif type(constant) is tuple or type(constant) is frozenset:
        for each in constant:
            yield from _texts_of(each)


_PIPELINES = ("after_item", "before_batch", "after_batch")
_SETTINGS = ("size", "mean", "std", "div", "mode", "method", "pad_input", "pad_idx", "sep")
_MOST = 64 * 1024**2
"""Bytes of a pickle that is only looked through."""
_NOTEBOOK = ("__main__", "__mp_main__", None)


def preprocessing(subject: TrialSubject) -> tuple[tuple[str, ...], str]:
    """Return (the transforms of the validation loader with their settings, the part of the Learner that does them to an item).

    A server has to do the same before the model. Those of torch's own loaders are their data set's, and a function that puts
    items together. Changes of batches in training alone are left out.
    """
    loaders = loaders_of(subject)
    if subject.learn is None or not loaders:
        return (), ""
    loader = loaders[-1]
    steps = [step for name in _PIPELINES for step in _steps(attribute_of(loader, name))]
    call = "dls.test_dl([item])" if steps else ""
    dataset = attribute_of(loader, "dataset")
    transform = attribute_of(dataset, "transform") or attribute_of(attribute_of(dataset, "transforms"), "transform")
    if transform is not None:
        several = attribute_of(transform, "transforms")
        steps += several if type(several) is list else [transform]
        call = "dls.valid.dataset.transform(item)"
    collate = attribute_of(loader, "collate_fn")
    if types.FunctionType in mro_of(type(collate)) and not str(collate.__module__).startswith("torch."):
        steps.append(collate)
    return tuple(_described(step) for step in steps if not _is_for_training(step)), call


def _is_for_training(step: Any) -> bool:
    """Say whether a Learner's transform leaves the validation set alone, as an augmentation does unless it also resizes."""
    attributes = attributes_of(step) or {}
    bases = mro_of(type(step))
    split = next((names["split_idx"] for names in (attributes, *map(namespace_of, bases)) if "split_idx" in names), None)
    is_random = any(cls.__name__ == "RandTransform" for cls in bases) and attributes.get("size") is None
    return is_random or (type(split) is int and split == 0)


def inputs_of(batch: TrialBatch) -> tuple[str, ...]:
    """Return the tensors that a model is called with, as in `float32 4×3×32×32 from -2.12 to 2.64`."""
    return tuple(map(_input, tensors_in((batch.inputs, batch.named_inputs or {}))))


def _input(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {'×'.join(map(str, tensor.shape))}".strip()
    if not tensor.numel() or tensor.is_complex():
        return kind
    low, high = (float(each) for each in tensor.detach().double().aminmax())
    return f"{kind} from {low:.3g} to {high:.3g}"


def _steps(pipeline: Any) -> Iterator[Any]:
    functions = attribute_of(pipeline, "fs")
    items = attribute_of(functions, "items") if functions is not None else None
    yield from items if type(items) is list else ()


def _described(step: Any) -> str:
    """Return a transform as it is shown: `Normalize(mean=0.485 0.456 0.406, std=…)`."""
    if types.FunctionType in mro_of(type(step)):
        return f"{step.__name__}()"
    attributes = attributes_of(step) or {}
    settings = [f"{name}={text}" for name in _SETTINGS if (text := _setting(attributes.get(name)))]
    return f"{name_of(type(step))}({', '.join(settings)})" if settings else name_of(type(step))


def _setting(value: Any) -> str:
    if torch.Tensor in mro_of(type(value)):
        return " ".join(f"{number:.4g}" for number in value.detach().flatten().tolist()[:4])
    if type(value) in (int, float, str, bool):
        return f"{value}"
    if {tuple, list} & set(mro_of(type(value))):
        parts = list(tuple.__iter__(value) if tuple in mro_of(type(value)) else list.__iter__(value))[:4]
        if all(type(part) in (int, float) for part in parts):
            return ("×" if all(type(part) is int for part in parts) else " ").join(f"{part:.4g}" for part in parts)
    return ""


def pickled_by_name(subject: TrialSubject) -> tuple[str, ...]:
    """Return the functions and classes of the notebook, and lambdas, that a pickle of the Learner only names.

    Tensors, datasets and items are left out: `learn.export()` does not write items either.
    """
    learn = subject.learn
    if learn is None:
        parts: list[Any] = [subject.model]
    else:
        pipelines = [attribute_of(loader, name) for loader in loaders_of(subject) for name in _PIPELINES]
        names = ("loss_func", "opt_func", "splitter", "metrics")
        parts = [subject.model, *pipelines, *(attribute_of(learn, name) for name in names), *_item_transforms(subject)]
        parts += [type(callback) for callback in attribute_of(learn, "cbs") or ()]
    names_seen: dict[str, None] = {}
    for part in parts:
        _look_through(part, names_seen)
    return tuple(names_seen)


def _item_transforms(subject: TrialSubject) -> Iterator[Any]:
    """Yield the pipelines of the training set's inputs and targets, where `label_func` is."""
    loaders = loaders_of(subject)
    lists = attribute_of(attribute_of(loaders[0], "dataset"), "tls") if loaders else None
    for each in attribute_of(lists, "items") or () if lists is not None else ():
        yield attribute_of(each, "tfms")


class _Looker(pickle.Pickler):
    """Goes through the contents of a pickle, notes the objects it only names, and writes no tensor."""

    def __init__(self, names: dict[str, None]) -> None:
        super().__init__(_Sink(), protocol=4)
        self._names = names

    def persistent_id(self, obj: Any) -> Any:
        """Note functions and classes of the notebook, and step over tensors."""
        bases = mro_of(type(obj))
        if types.FunctionType in bases or type in bases:
            module, name = getattr(obj, "__module__", None), obj.__qualname__
            if "<lambda>" in name:
                place, line = Sites().place(obj.__code__.co_filename), obj.__code__.co_firstlineno
                self._names[f"a lambda of {line_words(place, line, '')}"] = None
            elif "<locals>" in name:
                self._names[f"{name} (defined inside of a function)"] = None
            elif module in _NOTEBOOK:
                self._names[name] = None
            return "named"
        if type(obj).__module__ in _NOTEBOOK:
            self._names[name_of(type(obj))] = None
        return "tensor" if torch.Tensor in bases else None


class _Sink(io.RawIOBase):
    """A file that keeps nothing and is full at some time."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def write(self, data: Any) -> int:
        """Count the bytes that would have been written."""
        self._size += len(data)
        if self._size > _MOST:
            raise OSError("large enough")
        return len(data)


def _look_through(part: Any, names: dict[str, None]) -> None:
    try:
        _Looker(names).dump(part)
    except Exception as error:  # noqa: BLE001 - what cannot be pickled at all is worth a name, too
        if not isinstance(error, OSError):
            names[f"{name_of(type(part))}, which cannot be pickled ({type(error).__name__})"] = None
