"""torchdiffeq https://github.com/rtqichen/torchdiffeq#basic-usage"""

import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint, odeint_event


class Func(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(100, 3000), nn.Tanh(), nn.Linear(3000, 100))

    def forward(self, t, y):
        return self.net(y)


func = Func()
y0, t = torch.randn(8, 100), torch.linspace(0.0, 1.0, 5)
direct = odeint(func, y0, t, method="rk4")
adjoint = odeint_adjoint(func, y0, t)
loss = adjoint.mean() + direct.mean()
loss.backward()
when, events = odeint_event(
    func, y0, torch.tensor(0.0), event_fn=lambda t, y: t - 0.3, method="rk4", options={"step_size": 0.1}
)
