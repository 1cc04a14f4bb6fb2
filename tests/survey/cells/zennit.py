"""zennit https://zennit.readthedocs.io/en/latest/getting-started.html"""

import torch
from torchvision.models import vgg11
from zennit.attribution import Gradient, SmoothGrad
from zennit.composites import EpsilonGammaBox

model = vgg11(weights=None, num_classes=10).eval()
composite = EpsilonGammaBox(low=-3.0, high=3.0)
data = torch.rand(1, 3, 64, 64)
with Gradient(model=model, composite=composite) as attributor:
    output, relevance = attributor(data, torch.eye(10)[[2]])
