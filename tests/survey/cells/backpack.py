"""backpack-for-pytorch https://docs.backpack.pt/en/master/use_cases/example_all_in_one.html"""

import torch
from backpack import backpack, extend
from backpack.extensions import BatchGrad, DiagGGNExact, KFAC, Variance
from torch import nn

model = extend(nn.Sequential(nn.Flatten(), nn.Linear(100, 1000), nn.Sigmoid(), nn.Linear(1000, 10)))
loss_function = extend(nn.CrossEntropyLoss())
x, y = torch.randn(16, 100), torch.randint(0, 10, (16,))
loss = loss_function(model(x), y)
with backpack(BatchGrad(), Variance(), KFAC(), DiagGGNExact()):
    loss.backward()
spread = [each.variance for each in model.parameters()]
