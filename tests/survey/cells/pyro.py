"""pyro-ppl https://pyro.ai/examples/svi_part_i.html"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import nn


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 50_000)
        self.linear = PyroModule[nn.Linear](50_000, 1)
        self.linear.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x, y=None):
        mean = self.linear(self.hidden(x)).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            return pyro.sample("obs", dist.Normal(mean, 1.0), obs=y)


x, y = torch.randn(20, 3), torch.randn(20)
model = Regression()
guide = AutoNormal(model)
svi = SVI(model, guide, Adam({"lr": 0.01}), loss=Trace_ELBO())
for _ in range(3):
    loss = svi.step(x, y)
samples = Predictive(model, guide=guide, num_samples=5)(x)


def posterior(given):
    weights = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x @ weights, 1.0).to_event(1), obs=given)


mcmc = MCMC(NUTS(posterior), num_samples=5, warmup_steps=5, disable_progbar=True)
mcmc.run(y)
