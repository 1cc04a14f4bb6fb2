"""diffusers https://huggingface.co/docs/diffusers/api/pipelines/qwenimage"""

import torch
from diffusers import QwenImageTransformer2DModel

transformer = QwenImageTransformer2DModel(
    patch_size=2,
    in_channels=16,
    out_channels=4,
    num_layers=1,
    attention_head_dim=16,
    num_attention_heads=3,
    joint_attention_dim=16,
    axes_dims_rope=(8, 4, 4),
)
with torch.no_grad():
    image = transformer(
        hidden_states=torch.randn(1, 16, 16),
        encoder_hidden_states=torch.randn(1, 7, 16),
        encoder_hidden_states_mask=torch.ones(1, 7, dtype=torch.long),
        timestep=torch.tensor([0.5]),
        img_shapes=[[(1, 4, 4)]],
    ).sample
