"""diffusers https://github.com/huggingface/diffusers#quickstart"""

import torch
from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel

model = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(64, 128),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
scheduler = DDPMScheduler(num_train_timesteps=50)
noise = torch.randn(2, 3, 16, 16)
loss = model(scheduler.add_noise(noise, noise, torch.tensor([3, 4])), torch.tensor([3, 4])).sample.mean()
loss.backward()
pipeline = DDPMPipeline(unet=model, scheduler=scheduler)
pipeline.set_progress_bar_config(disable=True)
images = pipeline(batch_size=1, num_inference_steps=3).images
faster = DDIMPipeline(unet=model, scheduler=DDIMScheduler())
samples = faster(batch_size=1, num_inference_steps=3, output_type="np").images
