"""transformers https://huggingface.co/docs/transformers/tasks/object_detection"""

import torch
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

backbone = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], out_features=["stage4"])
config = DetrConfig(
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone=None,
    backbone_config=backbone,
    d_model=128,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    num_queries=10,
    position_embedding_type="learned",
)
model = DetrForObjectDetection(config).eval()
images = torch.randn(1, 3, 64, 64)
with torch.no_grad():
    found = model(images)
