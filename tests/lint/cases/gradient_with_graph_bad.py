import torch
from torch import nn


def penalty(x):
    model = nn.Linear(7, 5)
    loss = model(x).square().sum()
    loss.backward(create_graph=True)
    return sum(p.grad.square().sum() for p in model.parameters()).item()


found = [penalty(torch.randn(3, 7)) for _ in range(6)]
