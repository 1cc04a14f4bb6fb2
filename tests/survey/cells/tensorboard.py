"""tensorboard https://docs.pytorch.org/tutorials/recipes/recipes/tensorboard_with_pytorch.html"""

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

writer = SummaryWriter("runs")
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
writer.add_graph(model, torch.randn(2, 512))
for step in range(3):
    loss = model(torch.randn(8, 512)).square().mean()
    writer.add_scalar("loss", loss, step)
    writer.add_histogram("weights", model[0].weight, step)
writer.add_images("images", torch.rand(4, 3, 64, 64))
writer.add_embedding(torch.randn(50, 20), label_img=torch.rand(50, 3, 16, 16))
writer.close()
