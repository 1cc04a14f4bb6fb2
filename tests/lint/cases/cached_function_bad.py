from functools import lru_cache

import torch
from torch import nn


@lru_cache
def trainable(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


for fold in range(6):
    model = nn.Linear(7, 5)
    print(fold, trainable(model))
del model
