"""torch https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meeting", rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)))
model.register_comm_hook(None, default_hooks.allreduce_hook)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 512)).square().mean()
    loss.backward()
    optimizer.step()
sharded = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
fully_shard(sharded)
sharded(torch.randn(4, 512)).square().mean().backward()
dist.destroy_process_group()
Path("meeting").unlink()
