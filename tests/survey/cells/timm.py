"""timm https://huggingface.co/docs/timm/quickstart"""

import timm
import torch
from timm.data import Mixup, create_transform, resolve_model_data_config
from timm.models import FeatureListNet
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

model = timm.create_model("resnet18", pretrained=False, num_classes=10)
config = resolve_model_data_config(model)
transform = create_transform(**config, is_training=False)
averaged = ModelEmaV3(model, decay=0.99)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
scheduler = CosineLRScheduler(optimizer, t_initial=3)
mixup = Mixup(mixup_alpha=0.2, num_classes=10)
images, targets = mixup(torch.randn(2, 3, 64, 64), torch.tensor([1, 2]))
loss = torch.nn.functional.cross_entropy(model(images), targets)
loss.backward()
optimizer.step()
averaged.update(model)
features = timm.create_model("vit_tiny_patch16_224", features_only=True, img_size=64)
maps = features(torch.randn(1, 3, 64, 64))
other: FeatureListNet = timm.create_model("efficientnet_b0", features_only=True, out_indices=(1, 2))
outputs = other(torch.randn(1, 3, 64, 64))
