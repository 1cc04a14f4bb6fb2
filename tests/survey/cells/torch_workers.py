"""torch https://docs.pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,)))
loader = DataLoader(data, batch_size=16, num_workers=2, persistent_workers=True)
for X, y in loader:
    shape = X.shape
    break
model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
for X, y in loader:
    loss = loss_function(model(X), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pth")
states = torch.load("model.pth", weights_only=True)
