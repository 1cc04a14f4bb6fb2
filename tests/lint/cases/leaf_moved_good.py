import torch

weight = torch.zeros(4, 8, dtype=torch.double, requires_grad=True)
