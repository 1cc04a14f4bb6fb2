"""Calls of operators that are the same on any device, forward and backward: what each takes at most, and keeps, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

HALF = torch.float16


def calls(device: str, has_cudnn_attention: bool = False) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, call) of each probe; a call returns a result whose backward pass is probed, too.

    Where PyTorch hands attention in half precision to cuDNN, it is left out: the fake device has no cuDNN.
    """

    def real(*shape: int, dtype: Any = torch.float32, grad: bool = True) -> Any:
        return torch.empty(*shape, device=device, dtype=dtype, requires_grad=grad)

    def index(*shape: int) -> Any:
        return torch.zeros(*shape, device=device, dtype=torch.long)

    for dtype in (torch.float32, HALF):
        name, r = str(dtype)[6:], lambda *shape, dtype=dtype, grad=True: real(*shape, dtype=dtype, grad=grad)
        yield f"linear {name}", lambda r=r: functional.linear(r(4096, 512), r(1024, 512), r(1024))
        yield f"linear of three dimensions {name}", lambda r=r: functional.linear(r(8, 128, 512), r(1024, 512), r(1024))
        yield f"linear, transposed {name}", lambda r=r: functional.linear(r(8, 512, 128).transpose(1, 2), r(64, 512), r(64))
        yield f"bmm {name}", lambda r=r: torch.bmm(r(8, 128, 64), r(8, 64, 128))
        yield f"conv {name}", lambda r=r: functional.conv2d(r(16, 64, 56, 56), r(64, 64, 3, 3), r(64), padding=1)
        yield f"depthwise {name}", lambda r=r: functional.conv2d(r(16, 64, 56, 56), r(64, 1, 3, 3), None, padding=1, groups=64)
        yield f"layer norm {name}", lambda r=r: functional.layer_norm(r(16, 197, 768), [768], r(768), r(768))
        yield f"softmax {name}", lambda r=r: functional.softmax(r(8, 12, 197, 197), -1)
        yield f"dropout {name}", lambda r=r: functional.dropout(r(512, 1024), 0.3, True)
        yield f"gelu {name}", lambda r=r: functional.gelu(r(512, 1024))
        yield f"cross entropy {name}", lambda r=r: functional.cross_entropy(r(2048, 5000), index(2048))
        yield f"bits {name}", lambda r=r: functional.binary_cross_entropy_with_logits(r(512, 20), r(512, 20, grad=False))
        yield f"squares {name}", lambda r=r: functional.mse_loss(r(512, 2000), r(512, 2000, grad=False))
        yield f"sum {name}", lambda r=r: r(2**22).sum()
        yield f"sum of columns {name}", lambda r=r: r(8192, 1024).sum(0)
        yield f"sum of odd columns {name}", lambda r=r: r(6000, 999).sum(0)
        yield f"sum of channels {name}", lambda r=r: r(16, 64, 56, 56).sum((0, 2, 3))
        yield f"mean of pixels {name}", lambda r=r: r(16, 512, 7, 7).mean((2, 3))
        yield f"variance {name}", lambda r=r: r(8192, 1024, grad=False).var(0)
        yield f"amax {name}", lambda r=r: r(8192, 1024, grad=False).amax(0)
        yield f"max {name}", lambda r=r: r(8192, 1024).max(0)[0]
        yield f"argmax {name}", lambda r=r: r(8192, 10).argmax(-1)
        yield f"norm {name}", lambda r=r: r(2**22).norm()
        if not (has_cudnn_attention and dtype == HALF):
            yield (
                f"attention {name}",
                lambda r=r: functional.scaled_dot_product_attention(*(r(8, 8, 256, 64) for _ in range(3))),
            )
            yield (
                f"causal attention {name}",
                lambda r=r: functional.scaled_dot_product_attention(*(r(8, 8, 250, 64) for _ in range(3)), is_causal=True),
            )
        yield f"max pool {name}", lambda r=r: functional.max_pool2d(r(16, 64, 112, 112), 3, 2, 1)
        yield f"interpolate {name}", lambda r=r: functional.interpolate(r(4, 64, 28, 28), scale_factor=2.0, mode="bilinear")
        yield f"cat {name}", lambda r=r: torch.cat([r(16, 64, 28, 28), r(16, 32, 28, 28)], 1)
        yield f"few embeddings {name}", lambda r=r: functional.embedding(index(512, 3), r(1000, 50))
    yield (
        "batch norm",
        lambda: functional.batch_norm(
            real(16, 64, 56, 56), real(64, grad=False), real(64, grad=False), real(64), real(64), True
        ),
    )
    yield "sum of truths", lambda: torch.zeros(4096, 512, device=device, dtype=torch.bool).sum()
    yield "accuracy", lambda: (real(512, 10, grad=False).argmax(-1) == index(512)).float().mean()


def probe(
    device: str,
    allocated: Callable[[], int],
    peak: Callable[[], int],
    reset: Callable[[], None],
    has_cudnn_attention: bool = False,
) -> dict[str, Any]:
    """Return by call (most at once, kept) of its forward and its backward pass, in bytes beyond what was there before."""
    weight = torch.empty(64, 64, device=device, requires_grad=True)
    (weight @ weight).sum().backward()  # makes cuBLAS's workspaces
    del weight
    found = {}
    for name, call in calls(device, has_cudnn_attention):
        reset()
        start = allocated()
        out = call()
        forward = peak() - start, allocated() - start
        backward: tuple[int, int] | None = None
        if out.requires_grad:
            gradient = torch.empty_like(out)
            reset()
            start = allocated()
            out.backward(gradient)
            backward = peak() - start, allocated() - start
            del gradient
        found[name] = [forward, backward]
        del out
    return found
