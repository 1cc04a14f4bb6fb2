"""thop https://github.com/Lyken17/pytorch-OpCounter#how-to-use"""

import torch
from thop import profile
from torchvision.models import resnet18

model = resnet18(weights=None)
given = torch.randn(1, 3, 64, 64)
macs, params = profile(model, inputs=(given,), verbose=False)
