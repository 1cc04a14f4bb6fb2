"""torchsummary https://github.com/sksq96/pytorch-summary#usage"""

from torch import nn
from torchsummary import summary

model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 30 * 30, 32))
summary(model, (3, 32, 32), device="cpu")
