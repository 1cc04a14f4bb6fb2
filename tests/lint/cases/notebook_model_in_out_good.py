# %%
import torch
from torch import nn

device = torch.device("cpu")
# %%
model = nn.Linear(7, 5)
model.to(device);  # fmt: skip
# %%
print(sum(p.numel() for p in model.parameters()))
# %%
del model
