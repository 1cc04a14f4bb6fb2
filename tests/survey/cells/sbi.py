"""sbi https://sbi.readthedocs.io/en/latest/tutorials/00_getting_started.html"""

import torch
from sbi.inference import NPE
from sbi.utils import BoxUniform

prior = BoxUniform(low=-2 * torch.ones(3), high=2 * torch.ones(3))
theta = prior.sample((2000,))
x = theta + 1.0 + torch.randn_like(theta) * 0.1
inference = NPE(prior=prior, show_progress_bars=False)
inference = inference.append_simulations(theta, x)
network = inference.train(max_num_epochs=2)
posterior = inference.build_posterior()
samples = posterior.sample((5000,), x=x[0], show_progress_bars=False)
density = posterior.log_prob(samples, x=x[0])
