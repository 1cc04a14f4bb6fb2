"""Digests of a rank's parameters, gradients and buffers for `--check-ranks N`, and settings that all ranks should share."""

from __future__ import annotations

import os
import platform
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nbguard.memory.scan.devices.host import dotted, library_versions, reading
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.heap.kinds import attribute_of, name_of
from nbguard.training.profiler.analysis.ranks import DIGEST, NONE, Feed, RankDigests, TensorName
from nbguard.training.profiler.analysis.report import Setting
from nbguard.training.profiler.checks.optimizer_facts import groups_of
from nbguard.training.profiler.record.recorder import Recorder

# --- Settings of a rank that should be the same on all, such as variables, versions, driver, GPU, backend.


_PREFIXES = ("CUBLAS_", "CUDNN_", "FI_", "GLOO_", "MASTER_", "NCCL_", "PYTORCH_", "TORCH_NCCL_", "UCX_")
_NAMES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip


def environment() -> Iterator[Setting]:
    """Yield the settings. Nothing is imported, and no device is initialised."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES) or name in _NAMES:
            yield Setting(name, value)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:  # which ones may differ, how many should not
        yield Setting("number of CUDA_VISIBLE_DEVICES", str(len(devices.split(","))))
    yield _version("python", platform.python_version())
    yield from _packages()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield from _build(torch)
        yield from _device(torch)


def _packages() -> Iterator[Setting]:
    """Yield the versions of imported packages; one that only some ranks have imported is no difference."""
    for name, module in sorted(sys.modules.copy().items()):
        if "." in name or name.startswith("_") or name in sys.stdlib_module_names:
            continue
        version = getattr(module, "__dict__", {}).get("__version__")
        if isinstance(version, str) and version:
            yield _version(name, str(version))


def _build(torch: Any) -> Iterator[Setting]:
    build = library_versions(torch)
    versions = ("cuda", build.cuda), ("NCCL", dotted(build.nccl)), ("cuDNN", dotted(build.cudnn_loaded))
    for name, version in versions:
        if version:
            yield _version(name, version)


def _device(torch: Any) -> Iterator[Setting]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        yield Setting("backend", str(distributed.get_backend()))
    if not torch.cuda.is_initialized():
        return
    name = reading(lambda: str(torch.cuda.get_device_name()), "")
    if name:
        yield Setting("GPU model", name)
    with NvmlReader() as reader:
        driver = reader.driver()
    if driver is not None:
        yield _version("NVIDIA driver", driver[0])


def _version(name: str, version: str) -> Setting:
    return Setting(f"{name} version", version, is_version=True)


_LETTERS = 1 << 18  # of digests that are kept: beyond, every second check goes
_CHUNK = 1 << 18  # values that are summed at once: no large temporary tensors
_FACTOR = 0x9E3779B1  # a large odd number
_SHARDS = (("rank", "num_replicas"), ("process_index", "num_processes"), ("rank", "world_size"))
"""Names for the number of a part and of all, of torch's DistributedSampler, of a BatchSamplerShard, of a Learner's loader."""
_WRAPPER = "module."  # DistributedDataParallel's own part of a name


class RankDigester:
    """Makes the digests while a fit goes on. It reads values, and so waits for the device, at the steps that are checked."""

    watches = "agreement of ranks"

    def __init__(self, every: int) -> None:
        self._every = every
        self._model: weakref.ref[Any] | None = None
        self._steps = 0
        self._digests = RankDigests()
        self._places: dict[Any, Any] = {}  # of each device the weights of a chunk's places

    def start(self, recorder: Recorder) -> None:
        """Subscribe to the steps of a fit."""
        import torch

        self._torch: Any = torch
        recorder.subscribe("model", self._calls)
        recorder.subscribe("step", self._step, every_batch=True)

    def observe(self) -> RankDigests:
        """Return the digests so far."""
        return self._digests

    def loads(self, iterator: Any) -> None:
        """Note how the loader of an iterator divides the data."""
        if self._digests.feed.sampler:
            return
        batches = attribute_of(iterator, "_index_sampler")
        learners = attribute_of(attribute_of(iterator, "_dataset"), "d")
        for holder in (attribute_of(batches, "sampler"), batches, learners):
            feed = None if holder is None else _shard(holder)
            if feed is not None:
                self._digests = replace(self._digests, feed=feed)

    def _calls(self, module: Any, arguments: Any) -> None:
        if not module.training:
            return
        self._model = weakref.ref(module)
        feed = self._digests.feed
        batch = next((each.shape[0] for each in _tensors(self._torch, arguments) if each.ndim), None)
        if feed.batch is None and batch is not None:
            self._digests = replace(self._digests, feed=replace(feed, batch=int(batch)))

    def _step(self, optimizer: Any) -> None:
        self._steps += 1
        model = None if self._model is None else self._model()
        if model is None or (self._steps > 1 and self._steps % self._every):
            return
        names, tensors = [], []
        for name, tensor in _named(model):
            names.append(name)
            tensors.append(tensor)
        if tuple(names) != self._digests.tensors:  # the first check, or another model
            dropouts = sum(name_of(type(module)).startswith("Dropout") for module in model.modules())
            self._digests = replace(self._digests, tensors=tuple(names), checks=(), dropouts=dropouts)
        checks = (*self._digests.checks, (self._steps, "".join(self._digest_all(tensors))))
        if sum(len(digests) for _, digests in checks) > _LETTERS and len(checks) > 2:
            checks = (*checks[:-1:2], checks[-1])
        rate = next((rate for group in groups_of(optimizer) if type(rate := group.settings.get("lr")) is float), None)
        self._digests = replace(self._digests, checks=checks, feed=replace(self._digests.feed, rate=rate))

    def _digest_all(self, tensors: list[Any]) -> Iterator[str]:
        """Yield the digests of tensors; their sums come from the device together."""
        with self._torch.no_grad(), self._torch._C.DisableTorchFunctionSubclass():
            sums = [self._sum(tensor) for tensor in tensors]
            have = [each.to("cpu") for each in sums if each is not None]
        values = iter([int(each) for each in have])
        for each in sums:
            yield NONE if each is None else _letters(next(values))

    def _sum(self, tensor: Any) -> Any:
        """Return a number that depends on each bit of a tensor and its place; None for one that has no values here."""
        torch = self._torch
        if tensor is None or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return None
        if type(tensor).__module__.startswith("torch.distributed"):
            return None  # a rank's shard, or a tensor that is on several
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
        if integers is None:
            return None
        words = tensor.detach().contiguous().view(-1).view(integers)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for start in range(0, words.numel(), _CHUNK):
            part = words[start : start + _CHUNK].to(torch.int64)
            total = total * _FACTOR + (part * self._weights(part.device)[: part.numel()]).sum()  # it may overflow, alike on all
        return total

    def _weights(self, device: Any) -> Any:
        """Return an odd number for each place of a chunk."""
        known = self._places.get(device)
        if known is None:
            places = self._torch.arange(_CHUNK, dtype=self._torch.int64, device=device)
            known = self._places[device] = places * (2 * _FACTOR) + 1
        return known


def _letters(number: int) -> str:
    folded = number ^ (number >> 32)
    return f"{folded & 0xFFFFFFFF:0{DIGEST}x}"


def _named(model: Any) -> Iterator[tuple[TensorName, Any]]:
    """Yield the parameters of a model, their gradients, and its buffers, by name."""
    modules = dict(model.named_modules())

    def named(name: str, kind: Any) -> TensorName:
        owner = name_of(type(modules[name.rpartition(".")[0]]))
        return TensorName(name=name.removeprefix(_WRAPPER), kind=kind, module=owner)

    for name, parameter in model.named_parameters():
        yield named(name, "parameter"), parameter
        if parameter.requires_grad:
            yield named(name, "gradient"), parameter.grad
    for name, buffer in model.named_buffers():
        yield named(name, "buffer"), buffer


def _shard(holder: Any) -> Feed | None:
    """Return the part of the data that a sampler or a loader reads by its own word, or None where it divides none."""
    seed = attribute_of(holder, "seed")
    for own, all_of_them in _SHARDS:
        shard, shards = attribute_of(holder, own), attribute_of(holder, all_of_them)
        if type(shard) is int and type(shards) is int:
            return Feed(sampler=name_of(type(holder)), seed=seed if type(seed) is int else None, shard=shard, shards=shards)
    return None


def _tensors(torch: Any, arguments: Any) -> Iterator[Any]:
    values = arguments.values() if type(arguments) is dict else arguments
    return (each for each in values if isinstance(each, torch.Tensor))
