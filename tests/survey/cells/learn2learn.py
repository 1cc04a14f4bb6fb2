"""learn2learn https://github.com/learnables/learn2learn#getting-started"""

import learn2learn
import torch
from torch import nn

model = nn.Sequential(nn.Linear(40, 2000), nn.ReLU(), nn.Linear(2000, 5))
maml = learn2learn.algorithms.MAML(model, lr=0.1)
optimizer = torch.optim.SGD(maml.parameters(), lr=0.001)
for _ in range(3):
    optimizer.zero_grad()
    clone = maml.clone()
    error = nn.functional.mse_loss(clone(torch.randn(10, 40)), torch.randn(10, 5))
    clone.adapt(error)
    loss = nn.functional.mse_loss(clone(torch.randn(10, 40)), torch.randn(10, 5))
    loss.backward()
    optimizer.step()
