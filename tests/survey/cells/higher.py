"""higher https://github.com/facebookresearch/higher#usage"""

import higher
import torch
from torch import nn

model = nn.Sequential(nn.Linear(40, 4000), nn.ReLU(), nn.Linear(4000, 5))
optimizer = torch.optim.Adam(model.parameters())
with higher.innerloop_ctx(model, optimizer) as (functional_model, differentiable):
    for _ in range(2):
        loss = functional_model(torch.randn(8, 40)).square().mean()
        differentiable.step(loss)
    outer = functional_model(torch.randn(8, 40)).square().mean()
    outer.backward()
