"""schedulefree https://github.com/facebookresearch/schedule_free#how-to-use"""

import schedulefree
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.0025, warmup_steps=2)
optimizer.train()
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
optimizer.eval()
