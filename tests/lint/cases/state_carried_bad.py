import torch
from torch import nn

cell, head = nn.GRU(4, 8), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.0)
state = torch.zeros(1, 3, 8)
for x in torch.randn(6, 5, 3, 4):
    output, state = cell(x, state)
    loss = head(output).square().mean()
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
