"""torch https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
loss = compiled(torch.randn(4, 512)).square().mean()
loss.backward()
optimizer.step()


@torch.compile(backend="eager")
def scaled(x, weights):
    return torch.sin(x) @ weights


weights = torch.randn(512, 1024)
answer = scaled(torch.randn(4, 512), weights)
