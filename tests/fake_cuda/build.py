"""Compile the fake CUDA libraries for the PyTorch that is installed.

PyTorch's own libraries say which CUDA symbols they want, and in which version. What `src/` does not define gets a stub
that returns 0. One shared library holds everything; a symbolic link per CUDA library gives it that library's name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_CUDA_LIBRARY = re.compile(r"lib(cu(?!rl)|nv|nccl)\w*\.so")
_CUDA_SYMBOL = re.compile(
    r"(__)?(cu[A-Z]|cuda[A-Z]|cublas|cudnn|cufft|cusparse|cusolver|curand|cupti|cuFile|nccl|nvrtc|nvml|nvshmem|nvtx)"
)
_ALWAYS = {"libcuda.so.1", "libnvidia-ml.so.1"}
"""Loaded by name when they are needed, so no library lists them."""


class CannotBuildError(Exception):
    """The fake cannot be built here; the message says what is missing."""


def library() -> Path:
    """Return the folder with the fake libraries for the installed PyTorch; build it if there is none yet.

    The cache is keyed by the sources and the PyTorch they were built for. Raises CannotBuildError with the reason.
    """
    torch = _torch_folder()
    sources = sorted([*_HERE.glob("src/**/*.[ch]"), Path(__file__)])
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    key.update(f"{torch}{(torch / 'version.py').read_text()}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fake_cuda"
    folder = cache / key.hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / "lib"
            build(torch, built)
            try:
                built.rename(folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    return folder


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuildError("PyTorch is not installed")
    folder = Path(spec.origin).parent
    if not (folder / "lib/libtorch_cuda.so").exists():
        raise CannotBuildError("this PyTorch is not a CUDA build")
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise CannotBuildError(f"{', '.join(missing)} not found (Debian: apt-get install gcc libc6-dev)")
    return folder


def build(torch: Path, out: Path) -> None:
    """Compile the libraries into the folder `out`, for the PyTorch in the folder `torch`."""
    out.mkdir(parents=True)
    sonames, wanted = _wanted(torch)
    objects = _compile(torch, out)
    defined = {name for file in objects for name in re.findall(r" [TDB] (\w+)", _run("nm", file))}
    stubs = out / "stubs.c"
    stubs.write_text(_stubs(wanted.keys() - defined))
    versions = out / "versions.map"
    versions.write_text(_version_script(wanted))
    shared = out / "libfakecuda.so"
    _run(*_GCC, "-shared", "-o", shared, *objects, stubs, f"-Wl,--version-script={versions}", "-ldl", "-lpthread")
    for soname in sonames:
        (out / soname).symlink_to(shared.name)
    (out / "sonames").write_text("\n".join(sorted(sonames)) + "\n")
    for scrap in (*objects, stubs, versions):
        scrap.unlink()


_GCC = ("gcc", "-std=gnu11", "-O2", "-fPIC", "-fno-strict-aliasing", "-w")


def _wanted(torch: Path) -> tuple[set[str], dict[str, str]]:
    """Return the CUDA libraries that PyTorch (and torchvision, if installed) links to, and the symbols with their versions."""
    binaries = [*sorted((torch / "lib").glob("lib*.so")), *torch.parent.glob("torchvision/_C*.so")]
    sonames = set(_ALWAYS)
    symbols: dict[str, str] = {}
    for binary in binaries:
        needed = re.findall(r"NEEDED.*\[(.+?)\]", _run("readelf", "-dW", binary))
        sonames |= {name for name in needed if _CUDA_LIBRARY.match(name)}
        for line in _run("nm", "-D", "--undefined-only", binary).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if _CUDA_SYMBOL.match(name):
                symbols.setdefault(name, version)
    return sonames, symbols


def _compile(torch: Path, out: Path) -> list[Path]:
    headers = next(iter(sorted(torch.parent.glob("nvidia/**/include/driver_types.h"))), None)
    if headers is None:
        raise CannotBuildError(
            "CUDA's headers are not installed (package nvidia-cuda-runtime, which PyTorch's CUDA build brings)"
        )
    cuda = _defined(headers.parent / "cuda_runtime_api.h", "CUDART_VERSION")
    cudnn = _cudnn_version(torch)
    objects = []
    for source in sorted(_HERE.glob("src/*.c")):
        objects.append(out / f"{source.stem}.o")
        flags = (f"-DCUDA_VERSION_OF_HEADERS={cuda}", f"-DFAKE_CUDNN_VERSION={cudnn}")
        _run(*_GCC, *flags, f"-I{_HERE / 'src/include'}", f"-I{headers.parent}", "-c", source, "-o", objects[-1])
    return objects


def _cudnn_version(torch: Path) -> int:
    for header in torch.parent.glob("nvidia/**/include/cudnn_version*.h"):
        parts = [_defined(header, f"CUDNN_{part}") for part in ("MAJOR", "MINOR", "PATCHLEVEL")]
        return parts[0] * 10000 + parts[1] * 100 + parts[2]
    raise CannotBuildError("cuDNN's headers are missing: install nvidia-cudnn-cu13, as PyTorch's CUDA build does")


def _defined(header: Path, name: str) -> int:
    found = re.search(rf"#\s*define\s+{name}\s+(\d+)", header.read_text(errors="replace"))
    if found is None:
        raise CannotBuildError(f"{header.name} does not say {name}")
    return int(found[1])


def _stubs(names: set[str]) -> str:
    """Return C for the symbols that nothing depends on: success, a text where one is asked for, a handle where one is made."""
    lines = ["extern long fake_stub(const char *); extern void *calloc(unsigned long, unsigned long);"]
    for name in sorted(names):
        body = "return 0;"
        if re.search(r"GetErrorString$|GetErrorName$|GetStatusString$|GetLastError$", name):
            body = 'return (long)"fake";'
        elif name == "cufftCreate":  # a plan is a number, not a pointer
            body = "*(int *)a = 1; return 0;"
        elif "Create" in name and not name.startswith("cuda"):
            body = "*(void **)a = calloc(1, 64); return 0;"
        lines.append(f'long {name}(void *a) {{ fake_stub("{name}"); {body} }}')
    return "\n".join(lines) + "\n"


def _version_script(wanted: dict[str, str]) -> str:
    nodes: dict[str, list[str]] = {}
    for name, version in wanted.items():
        if version:
            nodes.setdefault(version, []).append(name)
    return "".join(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in sorted(nodes.items()))


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
