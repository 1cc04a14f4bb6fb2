import torch

weight = torch.zeros(4, 8, requires_grad=True).double()
