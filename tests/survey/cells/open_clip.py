"""open_clip_torch https://github.com/mlfoundations/open_clip#usage"""

import open_clip
import torch
from PIL import Image

model, _, preprocess = open_clip.create_model_and_transforms("RN50", pretrained=None)
model.eval()
tokenizer = open_clip.get_tokenizer("RN50")
image = preprocess(Image.new("RGB", (64, 64))).unsqueeze(0)
text = tokenizer(["a diagram", "a dog", "a cat"])
with torch.no_grad(), torch.autocast("cpu"):
    seen = model.encode_image(image)
    read = model.encode_text(text)
    seen /= seen.norm(dim=-1, keepdim=True)
    read /= read.norm(dim=-1, keepdim=True)
    probabilities = (100.0 * seen @ read.T).softmax(dim=-1)
loss = open_clip.ClipLoss()
figure = loss(seen.float(), read.float()[:1], torch.tensor(10.0))
