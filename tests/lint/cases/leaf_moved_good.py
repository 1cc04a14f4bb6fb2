import torch

weight = torch.zeros(4, 8, dtype=torch.double, requires_grad=True)


def optimizer():
    return torch.optim.SGD([weight], lr=0.1)
