"""torch-ema https://github.com/fadel/pytorch_ema#usage"""

import torch
from torch_ema import ExponentialMovingAverage

model = torch.nn.Linear(1000, 500)
ema = ExponentialMovingAverage(model.parameters(), decay=0.995)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    loss = model(torch.rand(10, 1000)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
with ema.average_parameters():
    answer = model(torch.rand(10, 1000))
