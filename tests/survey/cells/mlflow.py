"""mlflow-skinny https://mlflow.org/docs/latest/ml/deep-learning/pytorch/"""

import mlflow
import torch
from torch import nn

mlflow.set_tracking_uri("sqlite:///runs.db")
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
with mlflow.start_run():
    for step in range(3):
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        mlflow.log_metric("loss", loss.item(), step=step)
