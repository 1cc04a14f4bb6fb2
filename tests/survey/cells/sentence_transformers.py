"""sentence-transformers https://sbert.net/docs/sentence_transformer/training_overview.html"""

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

words = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "sat"])}
tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)
tokenizer.save_pretrained("bert")
config = BertConfig(vocab_size=3000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
BertModel(config).save_pretrained("bert")
encoder = Transformer("bert")
model = SentenceTransformer(modules=[encoder, Pooling(128)], device="cpu")
embeddings = model.encode(["a cat sat", "a dog sat"], convert_to_tensor=True)
similarities = model.similarity(embeddings, embeddings)
data = Dataset.from_dict({"anchor": ["a cat", "a dog"] * 4, "positive": ["cat sat", "dog sat"] * 4})
loss = losses.MultipleNegativesRankingLoss(model)
arguments = SentenceTransformerTrainingArguments(
    output_dir="out", num_train_epochs=1, report_to=[], save_strategy="no", use_cpu=True
)
trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
trainer.train()
