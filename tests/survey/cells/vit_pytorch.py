"""vit-pytorch https://github.com/lucidrains/vit-pytorch#usage"""

import torch
from vit_pytorch import MAE, ViT
from vit_pytorch.extractor import Extractor
from vit_pytorch.recorder import Recorder

model = ViT(image_size=64, patch_size=16, num_classes=10, dim=256, depth=2, heads=4, mlp_dim=512)
images = torch.randn(2, 3, 64, 64)
answers = model(images)
recorder = Recorder(model)
predictions, attention = recorder(images)
model = recorder.eject()
extractor = Extractor(model)
logits, embeddings = extractor(images)
mae = MAE(encoder=model, masking_ratio=0.75, decoder_dim=128, decoder_depth=1)
loss = mae(images)
loss.backward()
