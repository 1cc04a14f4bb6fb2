"""torch https://docs.pytorch.org/docs/stable/export.html"""

import torch
from torch import nn
from torch.fx import symbolic_trace

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
given = torch.randn(2, 512)
program = torch.export.export(model, (given,))
answer = program.module()(given)
torch.export.save(program, "model.pt2")
loaded = torch.export.load("model.pt2")
traced = torch.jit.trace(model, given)
scripted = torch.jit.script(model)
symbolic = symbolic_trace(model)
frozen = torch.jit.freeze(scripted)
