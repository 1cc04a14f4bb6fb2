"""torchjd https://torchjd.org/stable/examples/basic_usage/"""

import torch
from torch import nn
from torchjd import autojac
from torchjd.aggregation import UPGrad

model = nn.Sequential(nn.Linear(10, 5000), nn.ReLU(), nn.Linear(5000, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
output = model(torch.randn(16, 10))
losses = [output[:, 0].square().mean(), output[:, 1].abs().mean()]
autojac.backward(losses)
optimizer.zero_grad()
