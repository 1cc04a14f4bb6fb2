"""torchview https://github.com/mert-kurttutan/torchview#simple-examples-of-usage"""

from torch import nn
from torchview import draw_graph

model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 30 * 30, 32))
graph = draw_graph(model, input_size=(2, 3, 32, 32), device="cpu")
