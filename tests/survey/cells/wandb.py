"""wandb https://docs.wandb.ai/models/integrations/pytorch"""

import torch
import wandb
from torch import nn

run = wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True))
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
run.watch(model, log="all", log_freq=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(8, 512)).square().mean()
    loss.backward()
    optimizer.step()
    run.log({"loss": loss})
run.finish()
