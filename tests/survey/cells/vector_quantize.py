"""vector-quantize-pytorch https://github.com/lucidrains/vector-quantize-pytorch#usage"""

import torch
from vector_quantize_pytorch import FSQ, ResidualVQ, VectorQuantize

vq = VectorQuantize(dim=256, codebook_size=512, decay=0.8, commitment_weight=1.0)
quantized, indices, commit = vq(torch.randn(1, 1024, 256))
residual = ResidualVQ(dim=256, num_quantizers=4, codebook_size=256)
answer = residual(torch.randn(1, 1024, 256))
fsq = FSQ([8, 5, 5, 5])
finite = fsq(torch.randn(1, 1024, 4))
