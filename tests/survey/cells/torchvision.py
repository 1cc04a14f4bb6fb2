"""torchvision https://docs.pytorch.org/vision/stable/models.html"""

import torch
from torchvision import tv_tensors
from torchvision.models import resnet18
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
from torchvision.transforms import v2
from torchvision.utils import make_grid

model = resnet18(weights=None)
model.eval()
image = torch.randint(0, 256, (3, 96, 96), dtype=torch.uint8)
steps = v2.Compose([v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
boxes = tv_tensors.BoundingBoxes([[5, 5, 40, 40]], format="XYXY", canvas_size=(96, 96))
moved, boxed = steps(image, boxes)
scores = model(moved.unsqueeze(0)).softmax(1)
extractor = create_feature_extractor(model, {"layer2": "middle"})
middle = extractor(moved.unsqueeze(0))
detector = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3).eval()
found = detector([torch.rand(3, 96, 96), torch.rand(3, 80, 96)])
segments = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3).eval()(torch.rand(1, 3, 64, 64))
grid = make_grid(torch.rand(4, 3, 64, 64))
