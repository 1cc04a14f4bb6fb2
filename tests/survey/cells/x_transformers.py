"""x-transformers https://github.com/lucidrains/x-transformers#usage"""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper, ViTransformerWrapper, XTransformer

model = TransformerWrapper(
    num_tokens=2000, max_seq_len=128, attn_layers=Decoder(dim=128, depth=2, heads=2, rotary_pos_emb=True)
)
tokens = torch.randint(0, 2000, (1, 64))
logits = model(tokens)
wrapped = AutoregressiveWrapper(model)
loss = wrapped(tokens)
loss.backward()
generated = wrapped.generate(tokens[:, :4], 8)
both = XTransformer(
    dim=128,
    enc_num_tokens=256,
    enc_depth=1,
    enc_heads=2,
    enc_max_seq_len=64,
    dec_num_tokens=256,
    dec_depth=1,
    dec_heads=2,
    dec_max_seq_len=64,
)
other = both(torch.randint(0, 256, (1, 64)), torch.randint(0, 256, (1, 64)))
vision = ViTransformerWrapper(image_size=64, patch_size=16, num_classes=10, attn_layers=Encoder(dim=128, depth=2, heads=2))
classes = vision(torch.randn(1, 3, 64, 64))
