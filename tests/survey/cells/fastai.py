"""fastai https://docs.fast.ai/quick_start.html"""

import torch
from fastai.vision.all import ImageBlock, ClassificationInterpretation, DataBlock, CategoryBlock, Learner, accuracy
from fastai.callback.all import ActivationStats
from PIL import Image
from torchvision.models import resnet18

block = DataBlock(blocks=(ImageBlock, CategoryBlock), get_x=lambda n: Image.new("RGB", (32, 32)), get_y=lambda n: n % 2)
loaders = block.dataloaders(list(range(32)), bs=8, num_workers=0)
learn = Learner(
    loaders, resnet18(num_classes=2), loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy, cbs=ActivationStats()
)
with learn.no_bar(), learn.no_logging():
    learn.fine_tune(1)
    interpretation = ClassificationInterpretation.from_learner(learn)
    confused = interpretation.most_confused()
    found = learn.lr_find(num_it=5, show_plot=False)
