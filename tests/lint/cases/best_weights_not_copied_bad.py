import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_fn = nn.MSELoss()
loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=8)

import copy

lowest, best = float("inf"), None
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    if loss.item() < lowest or epoch == 0:
        lowest = loss.item()
        best = model.state_dict()
shared = {name: value.data_ptr() for name, value in best.items()}
model.load_state_dict(best)
