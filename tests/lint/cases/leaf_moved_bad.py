import torch

weight = torch.zeros(4, 8, requires_grad=True).double()


def optimizer():
    return torch.optim.SGD([weight], lr=0.1)
