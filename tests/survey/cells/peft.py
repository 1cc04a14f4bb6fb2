"""peft https://github.com/huggingface/peft#quickstart"""

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=2000, n_embd=256, n_layer=2, n_head=2, n_positions=64)
model = GPT2LMHeadModel(config)
lora = LoraConfig(r=16, lora_alpha=32, task_type=TaskType.CAUSAL_LM, target_modules=["c_attn"], lora_dropout=0.05)
adapted = get_peft_model(model, lora)
optimizer = torch.optim.AdamW(adapted.parameters())
tokens = torch.randint(0, 2000, (2, 12))
loss = adapted(input_ids=tokens, labels=tokens).loss
loss.backward()
optimizer.step()
adapted.save_pretrained("adapter")
base = GPT2LMHeadModel(config)
loaded = PeftModel.from_pretrained(base, "adapter")
answer = loaded(input_ids=tokens).logits
merged = loaded.merge_and_unload()
