"""Stand-ins for CuPy, JAX and TensorFlow on the fake device: packages whose memory comes from its driver.

They have what the real packages are asked for, by the same names, and nothing else. CuPy's are those of 14.2, JAX's of 0.10,
TensorFlow's of its source.
"""

from __future__ import annotations

from pathlib import Path

_MEMORY = """
import ctypes, glob, os
_fake = os.environ["LD_LIBRARY_PATH"].partition(":")[0]
_runtime = ctypes.CDLL(*glob.glob(f"{_fake}/libcudart.so.*"))  # .12 with PyTorch 2.8
def take(nbytes):
    found = ctypes.c_void_p()
    assert _runtime.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(nbytes)) == 0
    return found
def give(address): assert _runtime.cudaFree(address) == 0
"""

_CUPY = """
from cupy import cuda
class MemoryPool:
    def __init__(self): self.held, self.used = [], 0
    def total_bytes(self): return sum(nbytes for _, nbytes in self.held)
    def used_bytes(self): return self.used
    def alloc(self, nbytes): self.held.append((cuda.take(nbytes), nbytes)); self.used += nbytes
    def free(self): self.used = 0
    def free_all_blocks(self):
        if not self.used:
            for address, _ in self.held: cuda.give(address)
            self.held = []
_default_memory_pool = MemoryPool()
def get_default_memory_pool(): return _default_memory_pool
"""

_CUPY_CUDA = (
    _MEMORY
    + """
class runtime:
    @staticmethod
    def getDevice():
        found = ctypes.c_int(-1)
        assert _runtime.cudaGetDevice(ctypes.byref(found)) == 0
        return found.value
"""
)

_JAX = (
    _MEMORY
    + """
class Device:
    local_hardware_id, held, used = 0, 0, 0
    def memory_stats(self): return {"bytes_in_use": self.used, "pool_bytes": self.held, "bytes_limit": self.held}
class Client:
    def __init__(self): self.device = Device()
    def local_devices(self): return [self.device]
_backends = {}
def use(pool, used):
    _backends["cuda"] = client = Client()
    take(pool)
    client.device.held, client.device.used = pool, used
"""
)

_TENSORFLOW = (
    _MEMORY
    + """
class Context:
    _context_handle = None
    used = 0
    def list_logical_devices(self, kind): return [object()] if kind == "GPU" else []
    def get_memory_info(self, name):
        assert name == "GPU:0"
        return {"current": self.used, "peak": self.used}
_context = Context()
def use(pool, used):
    take(pool)
    _context._context_handle, _context.used = object(), used
"""
)

_FILES = {
    "cupy/__init__.py": _CUPY,
    "cupy/cuda/__init__.py": _CUPY_CUDA,
    "jax/__init__.py": "",
    "jax/_src/__init__.py": "",
    "jax/_src/xla_bridge.py": _JAX,
    "tensorflow/__init__.py": "",
    "tensorflow/python/__init__.py": "",
    "tensorflow/python/eager/__init__.py": "",
    "tensorflow/python/eager/context.py": _TENSORFLOW,
}


def install(folder: Path) -> None:
    """Write the stand-ins into a folder that becomes a part of the path."""
    for name, text in _FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
