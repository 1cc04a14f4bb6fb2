"""torchinfo https://github.com/TylerYep/torchinfo#how-to-use"""

from torch import nn
from torchinfo import summary

model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 30 * 30, 32))
statistics = summary(model, input_size=(4, 3, 32, 32), verbose=0)
