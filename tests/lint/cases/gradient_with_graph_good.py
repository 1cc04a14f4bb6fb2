import torch
from torch import nn


def penalty(x):
    model = nn.Linear(7, 5)
    loss = model(x).square().sum()
    grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
    return sum(grad.square().sum() for grad in grads).item()


found = [penalty(torch.randn(3, 7)) for _ in range(6)]
