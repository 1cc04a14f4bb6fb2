"""nnsight https://github.com/ndif-team/nnsight#quick-start"""

import torch
from nnsight import NNsight
from torch import nn

net = nn.Sequential(nn.Linear(200, 2000), nn.Linear(2000, 200))
model = NNsight(net)
with model.trace(torch.rand(3, 200)):
    hidden = model[0].output.save()
    output = model.output.save()
