"""Calls of operators that are the same on any device, forward and backward: what each takes at most, and keeps, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from nbguard.errors import UnpredictableError

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
        yield from _layers(name, r, index)
        yield from _losses(name, r, index)
        yield from _shapes(name, r, index)
        yield from _reductions(name, r)
        if not (has_cudnn_attention and dtype == HALF):
            yield from _attentions(name, r)
    yield (
        "batch norm",
        lambda: functional.batch_norm(
            real(16, 64, 56, 56), real(64, grad=False), real(64, grad=False), real(64), real(64), True
        ),
    )
    yield "sum of truths", lambda: torch.zeros(4096, 512, device=device, dtype=torch.bool).sum()
    yield "accuracy", lambda: (real(512, 10, grad=False).argmax(-1) == index(512)).float().mean()


Make = Callable[..., Any]
"""shape → a new tensor; `grad=False`: one that needs no gradient."""
Probe = tuple[str, Callable[[], Any]]


def _last(tensor: Any) -> Any:
    """Return a tensor in channels_last format that is a leaf."""
    return tensor.detach().to(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def _weights(r: Make, gates: int) -> list[Any]:
    """Return weights and biases of a recurrent cell from 64 inputs to 128 hidden units."""
    return [r(128 * gates, 64), r(128 * gates, 128), r(128 * gates), r(128 * gates)]


def _lstm_cell(r: Make) -> Any:
    return torch.lstm_cell(r(256, 64), (r(256, 128), r(256, 128)), *_weights(r, 4))


def _layers(name: str, r: Make, index: Make) -> Iterator[Probe]:
    f = functional
    yield f"conv of one dimension {name}", lambda: f.conv1d(r(16, 64, 500), r(128, 64, 5), r(128), padding=2)
    yield f"conv of three dimensions {name}", lambda: f.conv3d(r(2, 16, 12, 24, 24), r(32, 16, 3, 3, 3), r(32))
    yield f"conv, transposed {name}", lambda: f.conv_transpose2d(r(8, 64, 28, 28), r(64, 32, 2, 2), r(32), stride=2)
    yield f"conv, strided and dilated {name}", lambda: f.conv2d(r(8, 32, 56, 56), r(64, 32, 3, 3), None, 2, 2, dilation=2)
    yield f"conv, channels last {name}", lambda: f.conv2d(_last(r(16, 64, 56, 56)), _last(r(64, 64, 3, 3)), r(64), padding=1)
    yield f"conv, channels last, plain weight {name}", lambda: f.conv2d(_last(r(16, 64, 28, 28)), r(64, 64, 3, 3), r(64))
    yield f"conv, plain input, weight channels last {name}", lambda: f.conv2d(r(16, 64, 28, 28), _last(r(64, 64, 3, 3)), r(64))
    yield f"group norm {name}", lambda: f.group_norm(r(16, 64, 56, 56), 8, r(64), r(64))
    yield f"group norm, channels last {name}", lambda: f.group_norm(_last(r(16, 64, 56, 56)), 8, r(64), r(64))
    yield f"group norm of rows {name}", lambda: f.group_norm(r(16, 128, 256), 8, r(128), r(128))
    yield f"instance norm {name}", lambda: f.instance_norm(r(8, 32, 56, 56), weight=r(32), bias=r(32))
    yield f"rms norm {name}", lambda: f.rms_norm(r(16, 197, 768), [768], r(768))
    yield f"layer norm of a view {name}", lambda: f.layer_norm(r(16, 768, 197).transpose(1, 2), [768], r(768), r(768))
    yield f"layer norm without weights {name}", lambda: f.layer_norm(r(16, 197, 768), [768])
    yield (
        f"batch norm of rows {name}",
        lambda: f.batch_norm(r(4096, 512), r(512, grad=False), r(512, grad=False), r(512), r(512), True),
    )
    yield f"silu {name}", lambda: f.silu(r(512, 1024))
    yield f"tanh gelu {name}", lambda: f.gelu(r(512, 1024), approximate="tanh")
    yield f"glu {name}", lambda: f.glu(r(512, 1024))
    yield f"prelu {name}", lambda: f.prelu(r(16, 64, 56, 56), r(64))
    yield f"leaky relu in place {name}", lambda: f.leaky_relu(r(512, 1024) * 2, inplace=True)
    for activation in (f.mish, f.softplus, f.elu, f.hardswish, f.relu6, f.logsigmoid, f.hardtanh, f.tanh, f.sigmoid, f.selu):
        yield f"{activation.__name__} {name}", lambda activation=activation: activation(r(512, 1024))
    yield f"dropout of channels {name}", lambda: f.dropout2d(r(16, 64, 56, 56), 0.3, True)
    yield f"log softmax {name}", lambda: f.log_softmax(r(2048, 5000), -1)
    yield f"softmax of a middle dimension {name}", lambda: f.softmax(r(64, 1000, 32), 1)
    yield f"average pool {name}", lambda: f.avg_pool2d(r(16, 64, 56, 56), 2)
    yield f"adaptive average pool {name}", lambda: f.adaptive_avg_pool2d(r(16, 512, 14, 14), 1)
    yield f"adaptive average pool to seven {name}", lambda: f.adaptive_avg_pool2d(r(16, 64, 28, 28), 7)
    yield f"adaptive max pool {name}", lambda: f.adaptive_max_pool2d(r(16, 512, 14, 14), 1)
    yield f"max pool, channels last {name}", lambda: f.max_pool2d(_last(r(16, 64, 56, 56)), 3, 2, 1)
    yield f"nearest {name}", lambda: f.interpolate(r(4, 64, 28, 28), scale_factor=2.0, mode="nearest")
    yield f"nearest, channels last {name}", lambda: f.interpolate(_last(r(4, 64, 28, 28)), scale_factor=2.0, mode="nearest")
    yield f"bicubic {name}", lambda: f.interpolate(r(4, 64, 28, 28), scale_factor=2.0, mode="bicubic")
    yield f"columns of windows {name}", lambda: f.unfold(r(8, 16, 32, 32), 3, padding=1)
    yield f"columns of few windows {name}", lambda: f.unfold(r(16, 64, 64), 2, stride=4)
    yield f"columns of a view {name}", lambda: f.unfold(r(8, 32, 32, 16).permute(0, 3, 1, 2), 3, padding=1)
    yield f"windows added up {name}", lambda: f.fold(r(8, 144, 1024), (32, 32), 3, padding=1)
    yield f"bilinear layer {name}", lambda: f.bilinear(r(16, 20, 100), r(16, 20, 80), r(50, 100, 80), r(50))
    yield f"bilinear layer of fixed inputs {name}", lambda: f.bilinear(r(256, 100, grad=False), r(256, 80), r(1, 100, 80))
    yield f"affine grid {name}", lambda: f.affine_grid(r(16, 2, 3), [16, 3, 64, 64], align_corners=False)
    yield f"softmax of a view {name}", lambda: f.log_softmax(r(8, 64, 1000).transpose(1, 2), -1)
    yield f"conv of one dimension of a view {name}", lambda: f.conv1d(r(16, 100, 64).transpose(1, 2), r(32, 64, 3))
    yield f"conv, transposed, of channels last {name}", lambda: f.conv_transpose2d(_last(r(8, 64, 28, 28)), r(64, 32, 2, 2))
    yield f"LSTM cell {name}", lambda: sum(_lstm_cell(r))
    yield f"GRU cell {name}", lambda: torch.gru_cell(r(256, 64), r(256, 128), *_weights(r, 3))
    yield f"cell with tanh {name}", lambda: torch.rnn_tanh_cell(r(256, 64), r(256, 128), *_weights(r, 1))
    yield f"pixel shuffle {name}", lambda: f.pixel_shuffle(r(4, 64, 28, 28), 2)
    yield f"grid sample {name}", lambda: f.grid_sample(r(4, 16, 28, 28), r(4, 28, 28, 2), align_corners=False)
    yield f"many embeddings {name}", lambda: f.embedding(index(64, 128), r(5000, 256))
    yield f"embeddings with padding {name}", lambda: f.embedding(index(64, 100), r(3000, 128), padding_idx=0)
    yield f"bag of embeddings {name}", lambda: f.embedding_bag(index(512, 8), r(3000, 64), mode="mean")


def _losses(name: str, r: Make, index: Make) -> Iterator[Probe]:
    f = functional
    yield f"smoothed cross entropy {name}", lambda: f.cross_entropy(r(2048, 5000), index(2048), label_smoothing=0.1)
    yield f"cross entropy of pixels {name}", lambda: f.cross_entropy(r(8, 20, 64, 64), index(8, 64, 64))
    yield f"cross entropy of shares {name}", lambda: f.cross_entropy(r(512, 1000), r(512, 1000, grad=False))
    yield f"weighted cross entropy {name}", lambda: f.cross_entropy(r(512, 1000), index(512), r(1000, grad=False))
    yield f"likelihood {name}", lambda: f.nll_loss(f.log_softmax(r(512, 1000), -1), index(512))
    yield f"absolute {name}", lambda: f.l1_loss(r(512, 2000), r(512, 2000, grad=False))
    yield f"smooth absolute {name}", lambda: f.smooth_l1_loss(r(512, 2000), r(512, 2000, grad=False))
    yield f"huber {name}", lambda: f.huber_loss(r(512, 2000), r(512, 2000, grad=False))
    yield f"divergence {name}", lambda: f.kl_div(r(512, 2000), r(512, 2000, grad=False), reduction="batchmean")
    yield f"squares, summed {name}", lambda: f.mse_loss(r(512, 2000), r(512, 2000, grad=False), reduction="sum")
    yield f"squares, each {name}", lambda: f.mse_loss(r(512, 2000), r(512, 2000, grad=False), reduction="none")
    yield (
        f"weighted bits {name}",
        lambda: f.binary_cross_entropy_with_logits(r(512, 20), r(512, 20, grad=False), pos_weight=r(20, grad=False)),
    )
    yield f"bits by probability {name}", lambda: f.binary_cross_entropy(r(5120, 20).sigmoid(), r(5120, 20, grad=False))
    yield f"soft margin {name}", lambda: f.soft_margin_loss(r(512, 1000), r(512, 1000, grad=False))
    yield f"cosine embedding {name}", lambda: f.cosine_embedding_loss(r(512, 64), r(512, 64), r(512, grad=False))
    yield f"cosine {name}", lambda: f.cosine_similarity(r(2048, 128), r(2048, 128))
    yield f"triplet {name}", lambda: f.triplet_margin_loss(r(512, 64), r(512, 64), r(512, 64))


def _with_zeros(tensor: Any, mask: Any) -> Any:
    copy = tensor.clone()
    copy[mask] = 0.0
    return copy


def _shapes(name: str, r: Make, index: Make) -> Iterator[Probe]:
    yield f"rows by index {name}", lambda: r(5000, 128)[index(4000)]
    yield f"few rows by index {name}", lambda: r(5000, 128)[index(200)]
    yield f"many rows by index {name}", lambda: r(5000, 128)[index(50_000)]
    yield f"index select {name}", lambda: r(5000, 128).index_select(0, index(4000))
    yield f"gather {name}", lambda: r(512, 1000).gather(1, index(512, 10))
    yield f"scatter add {name}", lambda: r(512, 1000).scatter_add(1, index(512, 10), r(512, 10))
    yield f"index add {name}", lambda: r(512, 100).index_add(0, index(2000), r(2000, 100))
    yield f"where {name}", lambda: torch.where(index(512, 1000) > 0, r(512, 1000), r(512, 1000))
    yield f"masked fill {name}", lambda: r(512, 1000).masked_fill(index(512, 1000) > 0, 0.0)
    yield f"stack {name}", lambda: torch.stack([r(512, 100), r(512, 100)], 1)
    yield f"pad {name}", lambda: functional.pad(r(16, 32, 28, 28), (1, 1, 1, 1))
    yield f"reflected pad {name}", lambda: functional.pad(r(16, 32, 28, 28), (1, 1, 1, 1), mode="reflect")
    yield f"roll {name}", lambda: torch.roll(r(16, 56, 56, 96), (3, 3), (1, 2))
    yield f"flip {name}", lambda: r(16, 32, 28, 28).flip(3)
    yield f"repeat {name}", lambda: r(64, 100).repeat(4, 3)
    yield f"repeated items {name}", lambda: r(64, 100).repeat_interleave(3, 0)
    yield f"expand and add {name}", lambda: r(1, 64, 1, 1) + r(16, 64, 28, 28)
    yield f"contiguous of a view {name}", lambda: r(16, 64, 100).transpose(1, 2).contiguous()
    yield f"clamp {name}", lambda: r(512, 1000).clamp(-1, 1)
    yield f"product with a view {name}", lambda: r(16, 64, 100).transpose(1, 2) @ r(16, 64, 50)
    yield f"einsum {name}", lambda: torch.einsum("bhid,bhjd->bhij", r(4, 8, 100, 32), r(4, 8, 100, 32))
    yield f"product of rows {name}", lambda: r(4096, 512) @ r(512)
    yield f"broadcast product {name}", lambda: r(8, 1, 100, 32) @ r(4, 32, 50)
    yield f"baddbmm {name}", lambda: torch.baddbmm(r(8, 100, 50), r(8, 100, 32), r(8, 32, 50))
    yield f"lower triangle {name}", lambda: r(8, 200, 200).tril()
    yield f"sorted rows {name}", lambda: r(64, 1000).sort(-1)[0]
    yield f"sorted long rows {name}", lambda: r(64, 10_000, grad=False).sort(-1)[0]
    yield f"sorted row {name}", lambda: r(2**20, grad=False).sort()[0]
    yield f"topk {name}", lambda: r(512, 1000).topk(5)[0]
    yield f"cumulative sum {name}", lambda: r(512, 1000).cumsum(-1)
    yield f"distances {name}", lambda: torch.cdist(r(512, 64), r(300, 64)) if name == "float32" else r(3)
    if name == "float32":
        yield f"absolute distances {name}", lambda: torch.cdist(r(512, 64), r(300, 64), p=1.0)
        yield f"distances within {name}", lambda: functional.pdist(r(512, 64))
    yield f"distance {name}", lambda: torch.dist(r(512, 1000), r(512, 1000))
    yield f"mean at indices {name}", lambda: r(512, 100).scatter_reduce(0, index(2000, 100), r(2000, 100), "mean")
    yield f"at a mask, sorted {name}", lambda: r(512, 100).masked_scatter(index(512, 100) > 0, r(512, 100))
    yield f"rows that are set {name}", lambda: _with_zeros(r(512, 1000), index(512) > 0)
    yield f"sorted for the median {name}", lambda: r(512, 1000, grad=False).median()
    yield f"drawn, sorted {name}", lambda: torch.multinomial(r(512, 1000, grad=False), 5)
    yield f"drawn again, sorted {name}", lambda: torch.multinomial(r(512, 1000, grad=False), 5, replacement=True)
    yield f"coins {name}", lambda: torch.bernoulli(r(512, 1000, grad=False))
    yield f"permutation, sorted {name}", lambda: torch.randperm(100_000, device=index(1).device)
    yield f"number of values {name}", lambda: r(512, 1000, grad=False).count_nonzero()
    yield f"unbind {name}", lambda: sum(r(3, 512, 100).unbind(0))
    yield f"chunks {name}", lambda: torch.mul(*r(512, 1000).chunk(2, -1))


def _reductions(name: str, r: Make) -> Iterator[Probe]:
    yield f"mean {name}", lambda: r(2**22).mean()
    yield f"mean of channels, channels last {name}", lambda: _last(r(16, 64, 56, 56)).mean((2, 3))
    yield f"sum of rows {name}", lambda: r(1024, 8192).sum(-1)
    yield f"sum of a middle dimension {name}", lambda: r(64, 500, 64).sum(1)
    yield f"standard deviation {name}", lambda: r(4096, 512).std(0)
    yield f"variance and mean {name}", lambda: torch.var_mean(r(64, 50_000), dim=1)[0]
    yield f"logsumexp {name}", lambda: r(2048, 5000).logsumexp(-1)
    yield f"norm of rows {name}", lambda: r(4096, 512).norm(dim=-1)
    yield f"greatest absolute {name}", lambda: r(2**20, grad=False).abs().max()
    yield f"any {name}", lambda: (r(4096, 512, grad=False) > 0).any()
    yield f"all of rows {name}", lambda: (r(4096, 512, grad=False) > 0).all(0)
    yield f"finite {name}", lambda: r(4096, 512, grad=False).isfinite().all()


def _attentions(name: str, r: Make) -> Iterator[Probe]:
    attend = functional.scaled_dot_product_attention
    for width in (32, 40, 80, 96, 128):
        yield f"attention over heads of {width} {name}", lambda width=width: attend(*(r(4, 4, 200, width) for _ in range(3)))
    yield f"attention with a mask {name}", lambda: attend(*(r(4, 8, 128, 64) for _ in range(3)), r(4, 1, 128, 128, grad=False))
    yield (
        f"attention with a mask of bits {name}",
        lambda: attend(*(r(4, 8, 128, 64) for _ in range(3)), r(128, 128, grad=False) > 0),
    )
    yield f"attention to others {name}", lambda: attend(r(4, 8, 50, 64), r(4, 8, 130, 64), r(4, 8, 130, 64))
    yield f"attention with dropout {name}", lambda: attend(*(r(4, 8, 128, 64) for _ in range(3)), dropout_p=0.1)
    yield f"attention of views {name}", lambda: attend(*(r(4, 128, 8, 64).transpose(1, 2) for _ in range(3)))


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
    found: dict[str, Any] = {}
    for name, call in calls(device, has_cudnn_attention):
        try:
            found[name] = _measured(call, allocated, peak, reset)
        except (NotImplementedError, RuntimeError, UnpredictableError) as error:
            found[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def _measured(call: Callable[[], Any], allocated: Callable[[], int], peak: Callable[[], int], reset: Callable[[], None]) -> Any:
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
    return [forward, backward]
