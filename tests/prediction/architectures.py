"""Architectures of other people's libraries in plain PyTorch, small: what decides about memory is as theirs.

Each function returns (model, what makes an item, loss): Transformers' encoder and T5, a decoder with LoRA, diffusers' U-Net,
timm's ConvNeXt, ViT and EfficientNet.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WORDS = 3000
LENGTH = 96


def _split(x: Any, heads: int) -> Any:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _joined(x: Any) -> Any:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


class BertLayer(nn.Module):
    """A layer of BERT's: attention with a mask, norms after the sums."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.last = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = (_split(layer(x), self.heads) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm(self.dropout(self.out(_joined(attended))) + x)
        return self.last(self.dropout(self.down(functional.gelu(self.up(x)))) + x)


class Bert(nn.Module):
    """An encoder with a classifier on its first word."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (
            nn.Embedding(WORDS, width, padding_idx=0),
            nn.Embedding(512, width),
            nn.Embedding(2, width),
        )
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(width, 4) for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 10)
        self.register_buffer("range", torch.arange(512)[None])

    def forward(self, words: Any) -> Any:
        places = self.places(self.range[:, : words.shape[1]])
        x = self.dropout(self.norm(self.words(words) + self.kinds(torch.zeros_like(words)) + places))
        mask = (1.0 - torch.ones_like(words)[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        mask = mask.expand(-1, 1, words.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


class RmsNorm(nn.Module):
    """T5's norm, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class T5Attention(nn.Module):
    """T5's attention by matrix products, with a bias by the distance."""

    def __init__(self, width: int, heads: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias, self.norm = nn.Embedding(32, heads), RmsNorm(width)

    def forward(self, x: Any, others: Any = None) -> Any:
        inner = self.norm(x)
        others = inner if others is None else others
        q, k, v = _split(self.q(inner), self.heads), _split(self.k(others), self.heads), _split(self.v(others), self.heads)
        scores = torch.matmul(q, k.transpose(3, 2))
        distance = torch.arange(k.shape[2], device=x.device)[None] - torch.arange(q.shape[2], device=x.device)[:, None]
        bias = self.bias(distance.clamp(-16, 15) + 16).permute(2, 0, 1)[None]
        if self.is_causal:
            bias = bias + torch.triu(torch.full(scores.shape[-2:], -1e9, device=x.device), 1)
        scores = scores + bias
        weights = functional.dropout(functional.softmax(scores.float(), dim=-1).type_as(scores), 0.1, self.training)
        return x + functional.dropout(self.o(_joined(torch.matmul(weights, v))), 0.1, self.training)


class T5Feed(nn.Module):
    """T5's gated feed forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((width, 2 * width),) * 2 + ((2 * width, width),)
        )
        self.norm = RmsNorm(width)

    def forward(self, x: Any) -> Any:
        inner = self.norm(x)
        inner = functional.gelu(self.gate(inner), approximate="tanh") * self.up(inner)
        return x + functional.dropout(self.down(functional.dropout(inner, 0.1, self.training)), 0.1, self.training)


class T5(nn.Module):
    """An encoder and a decoder with shared words; the decoder reads what it should write."""

    def __init__(self, width: int = 192, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList(nn.ModuleList((T5Attention(width, 4), T5Feed(width))) for _ in range(layers))
        self.decoder = nn.ModuleList(
            nn.ModuleList((T5Attention(width, 4, is_causal=True), T5Attention(width, 4), T5Feed(width))) for _ in range(layers)
        )
        self.last, self.norm = RmsNorm(width), RmsNorm(width)

    def forward(self, words: Any) -> Any:
        x = self.words(words)
        for attention, feed in self.encoder:
            x = feed(attention(x))
        x, y = self.norm(x), self.words(words)
        for attention, cross, feed in self.decoder:
            y = feed(cross(attention(y), x))
        return functional.linear(self.last(y) * self.words.weight.shape[1] ** -0.5, self.words.weight)


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank part, as peft's."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.b(self.a(self.dropout(x))) * 2.0


def lora(decoder: nn.Module) -> nn.Module:
    """Return a decoder of which only low-rank parts are trained."""
    decoder.requires_grad_(False)
    for layer in decoder.layers:  # type: ignore[union-attr]
        layer.qkv, layer.out = Lora(layer.qkv), Lora(layer.out)
    return decoder


class ResBlock(nn.Module):
    """diffusers' ResnetBlock2D."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time, self.norm2 = nn.Linear(time, outer), nn.GroupNorm(8, outer)
        self.dropout, self.conv2 = nn.Dropout(0.0), nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else None

    def forward(self, x: Any, time: Any) -> Any:
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        h = self.conv2(self.dropout(functional.silu(self.norm2(h))))
        return (x if self.shortcut is None else self.shortcut(x)) + h


class Attention2d(nn.Module):
    """diffusers' attention over pixels."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        batch, width, height, _ = x.shape
        inner = self.norm(x.view(batch, width, -1)).transpose(1, 2)
        q, k, v = (_split(layer(inner), self.heads) for layer in (self.q, self.k, self.v))
        out = self.out(_joined(functional.scaled_dot_product_attention(q, k, v)))
        return out.transpose(-1, -2).reshape(batch, width, height, -1) + x


class Diffusion(nn.Module):
    """A U-Net that predicts noise; all items have the same time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2 = ResBlock(width, width, time), ResBlock(width, 2 * width, time)
        self.smaller, self.attention = nn.Conv2d(width, width, 3, 2, 1), Attention2d(2 * width)
        self.middle, self.up1 = ResBlock(2 * width, 2 * width, time), ResBlock(4 * width, width, time)
        self.larger, self.up2 = nn.Conv2d(width, width, 3, padding=1), ResBlock(2 * width, width, time)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        times = torch.full((x.shape[0],), 5, device=x.device)
        half = self.width // 2
        angles = times[:, None].float() * torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)[None]
        time = self.time(torch.cat([torch.sin(angles), torch.cos(angles)], -1))
        one = self.down1(self.first(x), time)
        two = self.attention(self.down2(self.smaller(one), time))
        up = self.up1(torch.cat([self.middle(two, time), two], 1), time)
        up = self.larger(functional.interpolate(up, scale_factor=2.0, mode="nearest"))
        return self.last(functional.silu(self.norm(self.up2(torch.cat([up, one], 1), time))))


class ChannelNorm(nn.LayerNorm):
    """timm's LayerNorm2d."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """timm's ConvNeXtBlock."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x: Any) -> Any:
        inner = self.norm(self.conv(x).permute(0, 2, 3, 1))
        inner = self.down(functional.gelu(self.up(inner))).permute(0, 3, 1, 2)
        return inner.mul(self.gamma.reshape(1, -1, 1, 1)) + x


def convnext() -> nn.Module:
    """Return a ConvNeXt of three stages."""
    stages: list[nn.Module] = [nn.Conv2d(3, 64, 4, 4), ChannelNorm(64), ConvNextBlock(64), ConvNextBlock(64)]
    for width in (128, 256):
        stages += [ChannelNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2), ConvNextBlock(width), ConvNextBlock(width)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(256), nn.Linear(256, 10))


class VitBlock(nn.Module):
    """timm's block of a vision transformer, with stochastic depth."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def _drop(self, x: Any) -> Any:
        if not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.9)
        kept.div_(0.9)
        return x * kept

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self._drop(self.out(attended))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Vit(nn.Module):
    """timm's vision transformer."""

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 16, 16), nn.Parameter(torch.zeros(1, 1, width))
        self.places, self.layers = (
            nn.Parameter(torch.zeros(1, 65, width)),
            nn.Sequential(*(VitBlock(width, heads) for _ in range(layers))),
        )
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


class InvertedResidual(nn.Module):
    """timm's InvertedResidual with squeeze and excitation; activations are in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inner
        self.expand, self.bn1 = nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth, self.bn2 = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.reduce, self.excite = nn.Conv2d(wide, inner // 4, 1), nn.Conv2d(inner // 4, wide, 1)
        self.project, self.bn3 = nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.is_residual = stride == 1 and inner == outer

    def forward(self, x: Any) -> Any:
        h = functional.silu(self.bn1(self.expand(x)), inplace=True)
        h = functional.silu(self.bn2(self.depth(h)), inplace=True)
        gate = self.excite(functional.silu(self.reduce(h.mean((2, 3), keepdim=True)), inplace=True)).sigmoid()
        h = self.bn3(self.project(h * gate))
        return h + x if self.is_residual else h


def efficientnet() -> nn.Module:
    """Return an EfficientNet of five blocks."""
    blocks = [InvertedResidual(a, b, s) for a, b, s in ((32, 32, 1), (32, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1))]
    stem = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(inplace=True)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 10))
