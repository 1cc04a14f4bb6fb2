"""torchsde https://github.com/google-research/torchsde#quick-example"""

import torch
import torchsde


class SDE(torch.nn.Module):
    noise_type = "general"
    sde_type = "ito"

    def __init__(self):
        super().__init__()
        self.mu = torch.nn.Linear(30, 30)
        self.sigma = torch.nn.Linear(30, 30 * 400)

    def f(self, t, y):
        return self.mu(y)

    def g(self, t, y):
        return self.sigma(y).view(64, 30, 400)


sde = SDE()
y0, ts = torch.full((64, 30), 0.1), torch.linspace(0, 1, 5)
ys = torchsde.sdeint(sde, y0, ts, dt=0.1)
noise = torchsde.BrownianInterval(t0=0.0, t1=1.0, size=(64, 400))
again = torchsde.sdeint_adjoint(sde, y0, ts, bm=noise, method="euler", dt=0.1)
again.mean().backward()
