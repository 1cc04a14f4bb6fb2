"""pytorch-optimizer https://pytorch-optimizers.readthedocs.io/en/latest/"""

import torch
from pytorch_optimizer import SAM, AdamP, Lookahead, create_optimizer

model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
given = torch.randn(8, 64)
adam = AdamP(model.parameters())
ahead = Lookahead(create_optimizer(model, "adamw", lr=1e-3))
sharp = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
for optimizer in (adam, ahead):
    model(given).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model(given).square().mean().backward()
sharp.first_step(zero_grad=True)
model(given).square().mean().backward()
sharp.second_step(zero_grad=True)
