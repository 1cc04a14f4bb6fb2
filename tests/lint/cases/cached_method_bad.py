from functools import lru_cache

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 5)

    @lru_cache(maxsize=None)
    def mask(self, n):
        return torch.ones(n, n).tril()

    def forward(self, x):
        return self.mask(5) @ self.layer(x)


for _ in range(6):
    model = Net()
    model(torch.randn(5, 7))
del model
