"""fvcore https://github.com/facebookresearch/fvcore/blob/main/docs/flop_count.md"""

import torch
from fvcore.nn import FlopCountAnalysis, flop_count_table, parameter_count
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 30 * 30, 32))
flops = FlopCountAnalysis(model, torch.randn(1, 3, 32, 32))
total = flops.total()
words = flop_count_table(flops)
counts = parameter_count(model)
