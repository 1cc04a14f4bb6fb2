"""accelerate https://github.com/huggingface/accelerate#easy-to-integrate"""

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 2))
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
data = DataLoader(TensorDataset(torch.randn(32, 64), torch.randint(0, 2, (32,))), batch_size=8, shuffle=True)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
model.train()
for epoch in range(2):
    for source, targets in data:
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(source), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
accelerator.save_state("state")
