"""torchao https://github.com/pytorch/ao#-quick-start"""

import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
quantize_(model, Int8WeightOnlyConfig())
answer = model(torch.randn(2, 512))
