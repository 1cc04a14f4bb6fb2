"""lightning https://lightning.ai/docs/fabric/stable/fundamentals/convert.html"""

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1)
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 2))
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=8))
for (batch,) in loader:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    fabric.backward(loss)
    optimizer.step()
fabric.save("checkpoint.ckpt", {"model": model, "optimizer": optimizer})
