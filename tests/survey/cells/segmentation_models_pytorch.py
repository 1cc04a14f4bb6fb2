"""segmentation-models-pytorch https://github.com/qubvel-org/segmentation_models.pytorch#-quick-start"""

import segmentation_models_pytorch as smp
import torch

model = smp.Unet(encoder_name="resnet18", encoder_weights=None, in_channels=1, classes=3)
loss_function = smp.losses.DiceLoss(mode="multiclass")
optimizer = torch.optim.Adam(model.parameters())
loss = loss_function(model(torch.randn(2, 1, 64, 64)), torch.randint(0, 3, (2, 64, 64)))
loss.backward()
optimizer.step()
tp, fp, fn, tn = smp.metrics.get_stats(
    torch.randint(0, 3, (2, 64, 64)), torch.randint(0, 3, (2, 64, 64)), mode="multiclass", num_classes=3
)
score = smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro")
other = smp.create_model("fpn", encoder_name="mobilenet_v2", encoder_weights=None, classes=2)
parts = other(torch.randn(2, 3, 64, 64))
segformer = smp.Segformer(encoder_name="mit_b0", encoder_weights=None)
mask = segformer(torch.randn(1, 3, 64, 64))
