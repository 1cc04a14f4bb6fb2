"""einops https://github.com/arogozhnikov/einops#api"""

import torch
from einops import einsum, rearrange, reduce, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 64, 5), Rearrange("b c h w -> b (c h w)"), nn.Linear(64 * 12 * 12, 100))
images = torch.randn(4, 3, 16, 16)
answers = model(images)
flat = rearrange(images, "b c h w -> b (h w) c")
pooled = reduce(images, "b c (h 2) (w 2) -> b c h w", "mean")
repeated = repeat(images, "b c h w -> b (r c) h w", r=20)
product = einsum(flat, flat, "b i c, b j c -> b i j")
layer = Reduce("b c h w -> b c", "max")(images)
