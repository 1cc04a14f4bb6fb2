"""torch https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html"""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
given = torch.randn(4, 512, requires_grad=True)
with (
    profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True) as prof,
    record_function("pass"),
):
    model(given).sum().backward()
words = prof.key_averages().table(sort_by="cpu_time_total", row_limit=3)
with FlopCounterMode(display=False) as flops:
    model(given).sum().backward()
kept = checkpoint(model, given, use_reentrant=False)
kept.sum().backward()
with torch.autograd.detect_anomaly(check_nan=False):
    model(given).sum().backward()
