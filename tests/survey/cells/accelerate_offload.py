"""accelerate https://huggingface.co/docs/accelerate/concept_guides/big_model_inference"""

import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))


model = make()
torch.save(model.state_dict(), "weights.bin")
with init_empty_weights():
    empty = make()
loaded = load_checkpoint_and_dispatch(empty, "weights.bin", device_map={"": "cpu"})
first = loaded(torch.randn(2, 256))
cpu_offload(model, execution_device=torch.device("cpu"))
second = model(torch.randn(2, 256))
third = make()
disk_offload(third, "offload", execution_device=torch.device("cpu"))
outcome = third(torch.randn(2, 256))
