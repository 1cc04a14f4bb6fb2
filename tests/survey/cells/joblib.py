"""joblib https://joblib.readthedocs.io/en/stable/parallel.html"""

import torch
from joblib import Memory, Parallel, delayed
from torch import nn

memory = Memory("cache", verbose=0)
model = nn.Linear(1000, 1000)


def score(net, x):
    return net(x).detach().sum()


x = torch.randn(50, 1000)
threads = Parallel(n_jobs=2, prefer="threads")(delayed(score)(model, x) for _ in range(4))
norm = memory.cache(torch.linalg.norm)(x)
lazily = list(Parallel(n_jobs=2, prefer="threads", return_as="generator")(delayed(score)(model, x) for _ in range(4)))
