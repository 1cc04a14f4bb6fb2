"""datasets https://huggingface.co/docs/datasets/use_with_pytorch"""

import numpy
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

data = Dataset.from_dict({"x": numpy.random.rand(2000, 200).tolist(), "y": list(range(2000))}).with_format("torch")
whole = data[:]
loader = DataLoader(data, batch_size=500)
for batch in loader:
    total = batch["x"].sum()
mapped = data.map(lambda row: {"z": row["x"] * 2}, batched=True)
stream = data.to_iterable_dataset(num_shards=2).with_format("torch")
first = next(iter(DataLoader(stream, batch_size=500)))
last = torch.stack(list(mapped[:100]["z"]))
