"""Memory that no Python object shows: PyTorch's workspaces and private pools, and the pools of other libraries."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

from nbguard.libraries import libraries
from nbguard.memory.core.facts import DeviceFacts, Graph, LibraryPool, PinnedFacts, PoolFact, PoolId
from nbguard.memory.core.references.graph import reach_of_roots
from nbguard.memory.scan.heap.kinds import mro_of

# --- Private pools of the allocator, and the objects that keep one in use


_left: frozenset[PoolId] = frozenset()
"""Private pools that the latest `empty_cache` gave nothing back of, though nothing named kept them."""


def remember_left_pools(pools: Set[PoolId]) -> None:
    """Remember the private pools that an `empty_cache` has just left with free segments while nothing named kept them."""
    global _left
    _left = frozenset(pools)


def pool_facts(keepers: Iterable[tuple[int, Any]], graph: Graph) -> tuple[PoolFact, ...]:
    """Return the private pools that (node, CUDAGraph or MemPool) pairs keep in use, and those that an empty cache left."""
    global _left
    by_pool: dict[PoolId, list[tuple[int, Any]]] = {}
    has_failed = False
    for node, keeper in keepers:
        pool = _pool_of(keeper)
        if pool is not None:
            by_pool.setdefault(pool, []).append((node, keeper))
        else:  # its capture may have failed: then the pool that it was to share with others stays in use
            has_failed = True
    if not by_pool and not _left:
        return ()
    named = reach_of_roots(graph, (number for number, root in enumerate(graph.roots) if root.kind != "library"))
    facts = []
    for pool, pairs in by_pool.items():
        nodes = tuple(node for node, _ in pairs)
        unnamed = tuple(node for node in nodes if node not in named)
        if unnamed != nodes:
            _left -= {pool}
        is_shared = _is_shared([keeper for _, keeper in pairs], has_failed)
        facts.append(PoolFact(pool=pool, keepers=nodes, unnamed=unnamed, is_shared=is_shared, is_left=pool in _left))
    return (*facts, *(PoolFact(pool=pool, keepers=(), is_left=True) for pool in sorted(_left - by_pool.keys())))


def _is_shared(keepers: list[Any], has_failed: bool) -> bool:
    """Say whether a pool may have users besides its keepers. Only a MemPool counts its users."""
    binding: Any = sys.modules["torch"]._C
    pools = [keeper for keeper in keepers if binding._CUDAGraph not in mro_of(type(keeper))]
    if pools and hasattr(binding._MemPool, "use_count"):
        return bool(binding._MemPool.use_count(pools[0]) > len(keepers))
    return has_failed


def _pool_of(keeper: Any) -> PoolId | None:
    """Return the pool's id as torch itself tells it: by torch's own method, not by one that a subclass has put over it."""
    binding: Any = sys.modules["torch"]._C
    try:
        if binding._CUDAGraph in mro_of(type(keeper)):
            return tuple(binding._CUDAGraph.pool(keeper))
        return tuple(binding._MemPool.id.__get__(keeper))
    except (RuntimeError, AttributeError):  # a graph that has captured nothing; a torch without MemPools
        return None


# --- Memory of the GPUs that other libraries of this process keep in pools of their own, as they count it
#
# Nothing is imported, and a library that has not used a GPU yet is not asked. Neither is a module of a library's name that is
# no package: it was not installed.


_Reading: TypeAlias = tuple[int, int, int | None]
"""(index of the device, bytes of the arrays, bytes of the pool or None where the library does not tell them)."""


def with_library_pools(devices: Sequence[DeviceFacts]) -> tuple[DeviceFacts, ...]:
    """Return the facts on devices with the pools of other libraries, none where a library counts otherwise than known.

    To be asked once this process uses CUDA, as CuPy's answer starts the driver, and forked processes could not use it then.
    """
    pools: dict[str, list[LibraryPool]] = {}
    for package, read in _READERS.items():
        # Memory that a version counts otherwise is the context's.
        with contextlib.suppress(Exception):
            for index, used, held in read() if _is_loaded(package) else ():
                pool = _pool(package, used, held)
                if pool.held > 0:
                    pools.setdefault(f"cuda:{index}", []).append(pool)
    return tuple(replace(facts, library_pools=tuple(pools.get(facts.device, ()))) if pools else facts for facts in devices)


def _pool(package: str, used: int, held: int | None) -> LibraryPool:
    library = next(each for each in libraries() if package in each.packages)
    return LibraryPool(
        library=library.name,
        held=used if held is None else held,
        used=used,
        is_whole=held is not None,
        release=library.pool.release,
        setting=library.pool.setting,
    )


def _is_loaded(package: str) -> bool:
    module = sys.modules.get(package)
    spec = None if type(module) is not ModuleType else module.__dict__.get("__spec__")
    return type(spec) is ModuleSpec and spec.submodule_search_locations is not None


def _global(module: str, name: str) -> Any:
    """Return a loaded module's global, or None."""
    loaded = sys.modules.get(module)
    return None if type(loaded) is not ModuleType else loaded.__dict__.get(name)


def _cupy() -> Iterator[_Reading]:
    """Yield CuPy's default pool of the current device. CuPy tells the others only after a change of the device."""
    pool = _global("cupy", "_default_memory_pool")
    if pool is not None and (held := pool.total_bytes()):
        yield _global("cupy", "cuda").runtime.getDevice(), pool.used_bytes(), held


def _jax() -> Iterator[_Reading]:
    """Yield JAX's pools, one for each GPU that it uses."""
    backends = _global("jax._src.xla_bridge", "_backends") or {}
    for platform in ("cuda", "rocm", "gpu"):
        for device in backends[platform].local_devices() if platform in backends else ():
            stats = device.memory_stats() or {}
            yield device.local_hardware_id, stats.get("bytes_in_use", 0), stats.get("pool_bytes")


def _tensorflow() -> Iterator[_Reading]:
    """Yield the bytes of TensorFlow's arrays on each GPU that it uses. It does not tell those of its pool."""
    context = _global("tensorflow.python.eager.context", "_context")
    if context is None or context._context_handle is None:
        return
    for index in range(len(context.list_logical_devices("GPU"))):
        yield index, context.get_memory_info(f"GPU:{index}")["current"], None


_READERS = {"cupy": _cupy, "jax": _jax, "tensorflow": _tensorflow}
"""Readers by the package that must be loaded."""


# --- Page-locked host memory of torch's pinned allocator, as its counters tell it.


_COUNTS_FREED = (2, 13)
"""The first torch whose counter of the bytes in use goes down where a block is freed (its pull request 183067 says why)."""


def pinned_facts() -> PinnedFacts | None:
    """Return the page-locked host memory of torch's pinned allocator; None if there is none, or torch does not count it."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized() or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return pinned_of(torch.cuda.host_memory_stats(), counts_freed=bool(torch.__version__ >= _COUNTS_FREED))


def pinned_of(stats: Mapping[str, Any], *, counts_freed: bool) -> PinnedFacts | None:
    """Return the figures of `torch.cuda.host_memory_stats`, or None where nothing is held.

    Up to torch 2.12 a block that is freed stays in `active_bytes.current`, and `active_bytes.freed` never rises above 0: with
    each block that is used again the counter moves further away. The bytes in use are known where the counters say that some
    were freed, or, before any was, of a torch that `counts_freed`; and in either case only up to the held bytes. Torch 2.7 to
    2.9 have other counters: `reserved_bytes` are the held bytes, and the bytes in use are unknown.
    """
    reserved = int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))
    if reserved <= 0:
        return None
    active, freed = int(stats.get("active_bytes.current", -1)), int(stats.get("active_bytes.freed", 0))
    is_counted = freed > 0 or (freed == 0 and counts_freed)
    return PinnedFacts(active if is_counted and 0 <= active <= reserved else None, reserved)


_KEEPS_LT = (2, 9)
"""The first torch that keeps a workspace for cuBLASLt (its pull request 156495); one before takes it again for each call."""
_UNIFIES = (2, 12)
"""The first torch whose cuBLASLt has cuBLAS's workspace unless a setting says otherwise (its pull request 175879)."""
_KEEPS_NONE = (2, 15)
"""The first torch that takes each workspace anew, and frees it after the call, unless TORCH_CUBLAS_WORKSPACE_CACHE is 1."""
_LT_KIB = 1024


def keeps_workspaces(torch: Any) -> bool:
    """Say whether torch keeps the workspaces of cuBLAS after the call that needed them."""
    return bool(torch.__version__ < _KEEPS_NONE) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def cublas_workspace(torch: Any, properties: Any) -> int | None:
    """Return the bytes of a workspace that torch keeps for cuBLAS, one for each handle and stream; None if it keeps none.

    CUBLAS_WORKSPACE_CONFIG lists `:KiB:count`; without it, 32 MiB on Hopper and 8.125 MiB elsewhere (torch's
    `getChosenWorkspaceSize`).
    """
    if not keeps_workspaces(torch):
        return None
    ask = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if ask is not None:
        try:
            return int(ask())
        except RuntimeError:  # after an error that lasts
            return None
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(kib) * int(count) for kib, count in sizes) * 1024
    return 32 * 1024**2 if properties.major == 9 else (2 * 4096 + 8 * 16) * 1024


def cublaslt_workspace(torch: Any) -> int | None:
    """Return the bytes of a workspace of cuBLASLt's own, kept or taken for each call; None where cuBLAS's serves, or none."""
    if getattr(torch.version, "hip", None):
        return None
    ask = getattr(torch._C, "_cuda_getCublasLtWorkspaceSize", None)
    try:
        told = None if ask is None else int(ask())
    except RuntimeError:  # after an error that lasts
        return None
    unifies = bool(torch.__version__ >= _UNIFIES) if keeps_workspaces(torch) else None
    return lt_workspace_of(os.environ, told, keeps=torch.__version__ >= _KEEPS_LT, unifies=unifies)


def lt_workspace_of(settings: Mapping[str, str], told: int | None, *, keeps: bool, unifies: bool | None) -> int | None:
    """Return the bytes of a workspace of cuBLASLt's own (torch's `getCUDABlasLtWorkspace`), or None where there is none.

    Args:
        settings: environment variables.
        told: the size that torch itself tells, from 2.13 on.
        keeps: this torch keeps such workspaces.
        unifies: it uses cuBLAS's instead unless TORCH_CUBLASLT_UNIFIED_WORKSPACE is 0; others do so only if that is 1. None:
            it has none of cuBLAS's to use, whatever the variable says.
    """
    setting = "" if unifies is None else settings.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "")
    unified = {"0": False, "1": True}.get(setting, unifies)
    if unified or not keeps:
        return None
    if told is not None:
        return told or None
    number = re.match(r"\s*\+?(\d{1,9})", settings.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return (int(number[1]) if number else _LT_KIB) * 1024 or None
