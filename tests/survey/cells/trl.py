"""trl https://github.com/huggingface/trl#sfttrainer"""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

words = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[EOS]", "a", "cat", "dog", "sat", "ran"])}
tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")
config = GPT2Config(vocab_size=2000, n_embd=128, n_layer=2, n_head=2, n_positions=64)
GPT2LMHeadModel(config).save_pretrained("tiny")
tokenizer.save_pretrained("tiny")
model = GPT2LMHeadModel.from_pretrained("tiny")
common = {
    "output_dir": "out",
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
}
texts = Dataset.from_dict({"text": ["a cat sat", "a dog ran"] * 4})
trainer = SFTTrainer(model=model, args=SFTConfig(max_length=16, **common), train_dataset=texts, processing_class=tokenizer)
trainer.train()
pairs = Dataset.from_dict({"prompt": ["a cat"] * 4, "chosen": [" sat"] * 4, "rejected": [" ran"] * 4})
preference = DPOTrainer(model=model, args=DPOConfig(max_length=16, **common), train_dataset=pairs, processing_class=tokenizer)
preference.train()
