import torch

correct = torch.eq(torch.arange(64) % 3, 0)
count = 0
for is_right in correct.tolist():
    count += is_right
