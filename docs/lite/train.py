import torch
from torch import nn
from torch.utils.data import DataLoader

train_loader = DataLoader(torch.randn(3072, 1024), batch_size=1024)
valid_loader = DataLoader(torch.randn(2048, 1024), batch_size=1024)
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
optimizer = torch.optim.Adam(model.parameters())
losses = []

for epoch in range(8):
    model.train()
    for batch in train_loader:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for batch in valid_loader:
        losses.append(model(batch).square().mean())
