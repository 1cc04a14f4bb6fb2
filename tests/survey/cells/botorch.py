"""botorch https://github.com/pytorch/botorch#getting-started"""

import torch
from botorch.acquisition import LogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood

train_x = torch.rand(200, 2, dtype=torch.double) * 2
train_y = 1 - (train_x - 0.5).norm(dim=-1, keepdim=True)
gp = SingleTaskGP(train_x, train_y, input_transform=Normalize(d=2), outcome_transform=Standardize(m=1))
mll = ExactMarginalLogLikelihood(gp.likelihood, gp)
fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 5}})
bounds = torch.stack([torch.zeros(2), torch.ones(2)]).to(torch.double)
expected = LogExpectedImprovement(model=gp, best_f=train_y.max())
candidate, value = optimize_acqf(expected, bounds=bounds, q=1, num_restarts=3, raw_samples=20, options={"maxiter": 5})
sampler = SobolQMCNormalSampler(torch.Size([64]))
noisy = qLogNoisyExpectedImprovement(gp, train_x, sampler=sampler)
batch, values = optimize_acqf(noisy, bounds=bounds, q=2, num_restarts=2, raw_samples=10, options={"maxiter": 3})
