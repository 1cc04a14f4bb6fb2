"""monai https://github.com/Project-MONAI/tutorials/blob/main/2d_classification/mednist_tutorial.ipynb"""

import torch
from monai.data import CacheDataset, DataLoader, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, EnsureChannelFirstd, RandFlipd, ScaleIntensityd

files = [{"image": torch.rand(48, 48), "label": (torch.rand(48, 48) > 0.5).float()} for _ in range(6)]
keys = ["image", "label"]
steps = Compose([EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd("image"), RandFlipd(keys, prob=0.5)])
data = CacheDataset(files, steps, progress=False)
loader = DataLoader(data, batch_size=2, shuffle=True)
model = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(32, 64, 128), strides=(2, 2), num_res_units=2)
loss_function = DiceLoss(sigmoid=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
metric = DiceMetric(include_background=True, reduction="mean")
for batch in loader:
    optimizer.zero_grad()
    outputs = model(batch["image"])
    loss = loss_function(outputs, batch["label"])
    loss.backward()
    optimizer.step()
    metric([AsDiscrete(threshold=0.5)(each) for each in decollate_batch(outputs)], decollate_batch(batch["label"]))
figure = metric.aggregate()
with torch.no_grad():
    whole = sliding_window_inference(torch.rand(1, 1, 96, 96), (48, 48), 2, model)
