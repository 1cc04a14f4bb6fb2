"""pytorch-metric-learning https://github.com/KevinMusgrave/pytorch-metric-learning#pytorch-metric-learning-examples"""

import torch
from pytorch_metric_learning import losses, miners, testers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import nn

model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 32))
miner, loss_function = miners.MultiSimilarityMiner(), losses.CrossBatchMemory(losses.TripletMarginLoss(), 32, memory_size=8192)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    data, labels = torch.randn(32, 64), torch.randint(0, 5, (32,))
    optimizer.zero_grad()
    embeddings = model(data)
    loss = loss_function(embeddings, labels)
    pairs = miner(embeddings, labels)
    loss.backward()
    optimizer.step()
