"""torchdata https://github.com/meta-pytorch/data#stateful-dataloader"""

import torch
from torch.utils.data import TensorDataset
from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper
from torchdata.stateful_dataloader import StatefulDataLoader

data = TensorDataset(torch.randn(1000, 200))
loader = StatefulDataLoader(data, batch_size=100)
for number, (batch,) in enumerate(loader):
    if number == 3:
        break
state = loader.state_dict()
node = Batcher(
    ParallelMapper(IterableWrapper(range(40)), map_fn=lambda n: torch.full((5000,), n), num_workers=2, method="thread"), 4
)
nodes = Loader(node)
for each in nodes:
    break
