"""diffusers https://huggingface.co/docs/diffusers/quicktour"""

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel, PNDMScheduler, StableDiffusionPipeline
from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from diffusers.hooks import apply_group_offloading

unet = UNet2DConditionModel(
    sample_size=8,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=8,
)
vae = AutoencoderKL(
    block_out_channels=(32, 64),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
)
pipeline = StableDiffusionPipeline(
    vae=vae,
    text_encoder=None,
    tokenizer=None,
    unet=unet,
    scheduler=PNDMScheduler(skip_prk_steps=True),
    safety_checker=None,
    feature_extractor=None,
    requires_safety_checker=False,
)
pipeline.set_progress_bar_config(disable=True)
words = torch.randn(1, 7, 32)
images = pipeline(
    prompt_embeds=words, negative_prompt_embeds=words, num_inference_steps=2, height=16, width=16, output_type="np"
).images
pipeline.enable_attention_slicing()
transformer = FluxTransformer2DModel(
    patch_size=1,
    in_channels=4,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=[4, 4, 8],
)
flux = FluxPipeline(
    scheduler=FlowMatchEulerDiscreteScheduler(),
    vae=AutoencoderKL(latent_channels=1),
    text_encoder=None,
    tokenizer=None,
    text_encoder_2=None,
    tokenizer_2=None,
    transformer=transformer,
)
flux.set_progress_bar_config(disable=True)
drawn = flux(
    prompt_embeds=torch.randn(1, 7, 32),
    pooled_prompt_embeds=torch.randn(1, 32),
    num_inference_steps=2,
    height=16,
    width=16,
    output_type="latent",
).images
apply_group_offloading(unet, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level")
offloaded = unet(torch.randn(1, 4, 8, 8), 1, words).sample
