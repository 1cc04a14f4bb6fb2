"""bitsandbytes https://huggingface.co/docs/bitsandbytes/main/en/optimizers"""

import bitsandbytes
import torch
from torch import nn

layer = bitsandbytes.nn.Linear4bit(256, 4096, quant_type="nf4", compute_dtype=torch.float32)
layer.load_state_dict(nn.Linear(256, 4096).state_dict())
layer = layer.to("cpu")
answer = layer(torch.randn(2, 256))
packed, state = bitsandbytes.functional.quantize_4bit(torch.randn(1024, 1024), quant_type="nf4")
back = bitsandbytes.functional.dequantize_4bit(packed, state)
eight, statistics = bitsandbytes.functional.quantize_blockwise(torch.randn(1024, 1024))
