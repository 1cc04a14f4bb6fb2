"""transformer-lens https://github.com/TransformerLensOrg/TransformerLens#quick-start"""

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

config = HookedTransformerConfig(
    n_layers=2, d_model=128, n_ctx=32, d_head=32, n_heads=4, d_vocab=1000, act_fn="gelu", device="cpu"
)
model = HookedTransformer(config)
tokens = torch.randint(0, 1000, (1, 20))
logits, activations = model.run_with_cache(tokens)
changed = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda value, hook: value * 0)])
