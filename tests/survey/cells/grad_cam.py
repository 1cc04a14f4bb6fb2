"""grad-cam https://github.com/jacobgil/pytorch-grad-cam#using-from-code-as-a-library"""

import torch
from pytorch_grad_cam import AblationCAM, EigenCAM, GradCAM, ScoreCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torchvision.models import resnet18

model = resnet18(weights=None, num_classes=10).eval()
layers = [model.layer4[-1]]
images = torch.rand(1, 3, 64, 64)
targets = [ClassifierOutputTarget(2)]
with GradCAM(model=model, target_layers=layers) as cam:
    grey = cam(input_tensor=images, targets=targets)[0, :]
    answers = cam.outputs
eigen = EigenCAM(model=model, target_layers=layers)
second = eigen(input_tensor=images, targets=targets)
