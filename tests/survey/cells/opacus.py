"""opacus https://github.com/pytorch/opacus#getting-started"""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,))), batch_size=8)
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.1, max_grad_norm=1.0
)
for data, labels in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(data), labels)
    loss.backward()
    optimizer.step()
spent = engine.get_epsilon(delta=1e-5)
