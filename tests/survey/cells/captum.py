"""captum https://github.com/pytorch/captum#getting-started"""

import torch
from captum.attr import GradientShap, IntegratedGradients, LayerConductance, NeuronConductance
from torch import nn


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(3, 300_000)
        self.relu = nn.ReLU()
        self.lin2 = nn.Linear(300_000, 2)

    def forward(self, given):
        return self.lin2(self.relu(self.lin1(given)))


model = ToyModel()
model.eval()
given = torch.rand(2, 3)
baseline = torch.zeros(2, 3)
attributions, delta = IntegratedGradients(model).attribute(given, baseline, target=0, return_convergence_delta=True, n_steps=5)
shap = GradientShap(model)
shap_attributions = shap.attribute(given, baselines=torch.randn(5, 3), target=0, n_samples=3)
conductance = LayerConductance(model, model.lin1).attribute(given, baselines=baseline, target=0, n_steps=5)
neuron = NeuronConductance(model, model.lin1).attribute(given, neuron_selector=1, target=0, n_steps=5)
