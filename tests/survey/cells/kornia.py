"""kornia https://kornia.readthedocs.io/en/latest/get-started/introduction.html"""

import kornia
import torch
from kornia import augmentation
from torch import nn

images = torch.rand(4, 3, 128, 128)
augment = nn.Sequential(
    augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1), augmentation.RandomAffine(30.0), augmentation.RandomPerspective(0.5)
)
changed = augment(images)
sequence = augmentation.AugmentationSequential(augmentation.RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"])
flipped, mask = sequence(images, torch.ones(4, 1, 128, 128))
edges = kornia.filters.canny(images)
blurred = kornia.filters.gaussian_blur2d(images, (11, 11), (3.0, 3.0))
turned = kornia.geometry.transform.rotate(images, torch.tensor([20.0] * 4))
warped = kornia.geometry.transform.warp_perspective(images, torch.eye(3).repeat(4, 1, 1), (100, 100))
loss = kornia.losses.ssim_loss(images, blurred, 5)
features = kornia.feature.SIFTFeature(20)(kornia.color.rgb_to_grayscale(images[:1]))
grey = kornia.color.rgb_to_lab(images)
hard = kornia.feature.DISK()
