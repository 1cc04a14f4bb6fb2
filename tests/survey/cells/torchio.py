"""torchio https://docs.torchio.org/quickstart/"""

import torch
import torchio
from torch.utils.data import DataLoader

subjects = [
    torchio.Subject(
        image=torchio.ScalarImage(tensor=torch.rand(1, 32, 32, 32)), label=torchio.LabelMap(tensor=torch.ones(1, 32, 32, 32))
    )
    for _ in range(4)
]
steps = torchio.Compose([torchio.RescaleIntensity((0, 1)), torchio.RandomAffine(), torchio.RandomNoise()])
data = torchio.SubjectsDataset(subjects, transform=steps)
first = data[0]
queue = torchio.Queue(data, 10, 2, torchio.UniformSampler(16), num_workers=0)
loader = DataLoader(queue, batch_size=2, num_workers=0)
for batch in loader:
    patches = batch["image"]["data"]
