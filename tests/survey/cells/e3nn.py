"""e3nn https://docs.e3nn.org/en/stable/guide/convolution.html"""

import torch
from e3nn import o3
from e3nn.nn import BatchNorm, FullyConnectedNet, Gate
from e3nn.util.jit import compile_mode

given, hidden = o3.Irreps("32x0e + 16x1o"), o3.Irreps("32x0e + 16x1o + 8x2e")
harmonics = o3.spherical_harmonics([0, 1, 2], torch.randn(300, 3), normalize=True)
product = o3.FullyConnectedTensorProduct(given, o3.Irreps.spherical_harmonics(2), hidden, shared_weights=False)
net = FullyConnectedNet([10, 256, product.weight_numel], torch.nn.functional.silu)
weights = net(torch.randn(50, 10))
outputs = product(given.randn(50, -1), harmonics[:50], weights)
linear = o3.Linear(hidden, given)
normed = BatchNorm(given)(linear(outputs))
gate = Gate("16x0e", [torch.tanh], "32x0e", [torch.tanh], "16x1o+16x1e")
gated = gate(gate.irreps_in.randn(5, -1))
turn = hidden.D_from_matrix(o3.rand_matrix())
