"""Which GPU is here. Asked in a process of its own, so that whoever asks opens no context."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any

from tests.gpu import child

FAKE = "Fake CUDA GPU"
_PACKAGES = ("torch", "torchvision", "fastai", "ipython", "nvidia-ml-py")


def look() -> dict[str, Any]:
    """Return what the driver and torch say about device 0; `name` is empty where there is none."""
    facts: dict[str, Any] = {"name": "", "versions": versions()}
    if importlib.util.find_spec("torch") is None:
        return facts
    import torch

    facts["versions"]["cuda"] = torch.version.cuda
    if not torch.cuda.is_available():
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "name": str(properties.name),
        "capacity": int(properties.total_memory),
        "capability": [properties.major, properties.minor],
        "driver": driver(),
        "devices": torch.cuda.device_count(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions that the figures depend on; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def driver() -> str | None:
    """Return the driver's version, or None where it does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def ask() -> dict[str, Any]:
    """Return `look()` from a process of its own."""
    found: dict[str, Any] = child.answer(__name__, "look", limit=120)
    return found


def refusal(facts: dict[str, Any], *, dry: bool) -> str:
    """Return in one line why the day cannot run on the device of `facts`, or an empty string."""
    if facts["versions"]["torch"] is None:
        return f"PyTorch is not importable by {platform.python_implementation()} {platform.python_version()}: nothing to run"
    if dry:
        return (
            "" if facts["name"].startswith(FAKE) else "--dry is for the fake runtime: start it with python -m tests.fake_cuda"
        )
    if not facts["name"]:
        return "no GPU that torch can use here (try it on the fake runtime: make gpu-day DRY=1)"
    if facts["name"].startswith(FAKE):
        return "this is the fake runtime: what it says is no measurement. Add --dry to try the program on it"
    return ""
