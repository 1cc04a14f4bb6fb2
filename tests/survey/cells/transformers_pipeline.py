"""transformers https://huggingface.co/docs/transformers/pipeline_tutorial"""

import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

config = ViTConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512, image_size=64)
model = ViTForImageClassification(config)
processor = ViTImageProcessor(size={"height": 64, "width": 64})
classifier = pipeline("image-classification", model=model, image_processor=processor)
image = Image.new("RGB", (80, 80))
answers = classifier([image, image], batch_size=2)
with torch.no_grad():
    logits = model(**processor(image, return_tensors="pt")).logits
