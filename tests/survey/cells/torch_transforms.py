"""torch https://docs.pytorch.org/docs/stable/func.whirlwind_tour.html"""

import copy

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import SWALR, AveragedModel

model = nn.Linear(600, 600)
given = torch.randn(4, 600)
gradients = grad(lambda weights: functional_call(model, weights, (given,)).sum())(dict(model.named_parameters()))
samples = vmap(grad(lambda weights, x: functional_call(model, weights, (x,)).sum()), (None, 0))(
    dict(model.named_parameters()), given
)
jacobian = jacrev(model)(given[0])
parameters, buffers = stack_module_state([nn.Linear(600, 600) for _ in range(3)])
normed = (
    parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(600, 600)), name="bias")
    if False
    else parametrizations.weight_norm(nn.Linear(600, 600))
)
normed(given).sum().backward()
pruned = prune.l1_unstructured(nn.Linear(600, 600), "weight", amount=0.3)
average = AveragedModel(model)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
schedule = SWALR(torch.optim.SGD(model.parameters(), lr=0.1), swa_lr=0.05)
loss = optimizer.step(lambda: (optimizer.zero_grad(), model(given).square().mean())[1])
average.update_parameters(model)
twin = copy.deepcopy(model)
