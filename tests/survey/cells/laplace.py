"""laplace-torch https://github.com/aleximmer/Laplace#simple-usage"""

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(20, 1000), nn.ReLU(), nn.Linear(1000, 3))
loader = DataLoader(TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,))), batch_size=16)
la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
la.fit(loader)
la.optimize_prior_precision(method="marglik", n_steps=3)
answer = la(torch.randn(4, 20), link_approx="probit", pred_type="nn" if False else "glm")
