"""transformers https://huggingface.co/docs/transformers/trainer"""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Reviews(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, at):
        return {"input_ids": torch.randint(0, 5000, (12,)), "labels": torch.tensor(at % 2)}


config = BertConfig(vocab_size=5000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=1, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True
)
trainer = Trainer(model=model, args=arguments, train_dataset=Reviews(), eval_dataset=Reviews())
trainer.train()
metrics = trainer.evaluate()
predictions = trainer.predict(Reviews())
