"""shap https://github.com/shap/shap#deep-learning-example-with-gradientexplainer"""

import numpy
import shap
import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 13 * 13, 600), nn.ReLU(), nn.Linear(600, 3)
)
background = torch.randn(20, 1, 28, 28)
deep = shap.DeepExplainer(model, background)
values = deep.shap_values(torch.randn(2, 1, 28, 28), check_additivity=False)
gradient = shap.GradientExplainer(model, background)
gradients = gradient.shap_values(torch.randn(2, 1, 28, 28), nsamples=5)
inner = shap.GradientExplainer((model, model[0]), background)
middle = inner.shap_values(torch.randn(2, 1, 28, 28), nsamples=5)
table = nn.Sequential(nn.Linear(6, 5000), nn.Tanh(), nn.Linear(5000, 1))
kernel = shap.KernelExplainer(lambda x: table(torch.tensor(x, dtype=torch.float32)).detach().numpy(), numpy.zeros((2, 6)))
explained = kernel.shap_values(numpy.random.rand(2, 6), nsamples=20, silent=True)
