"""transformers https://huggingface.co/docs/transformers/llm_tutorial"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, StaticCache

config = GPT2Config(vocab_size=2000, n_embd=128, n_layer=2, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=1)
model = GPT2LMHeadModel(config).eval()
prompt = torch.randint(2, 2000, (2, 10))
sampled = model.generate(prompt, max_new_tokens=8, do_sample=True, top_k=20, pad_token_id=1)
beams = model.generate(prompt, max_new_tokens=8, num_beams=3, pad_token_id=1, return_dict_in_generate=True, output_scores=True)
static = model.generate(prompt, max_new_tokens=8, cache_implementation="static", pad_token_id=1, disable_compile=True)
cache = StaticCache(config=config, max_cache_len=64)
