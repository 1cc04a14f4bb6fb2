"""optimum https://huggingface.co/docs/optimum/torch_fx/usage_guides/optimization"""

import torch
from optimum.fx.optimization import ChangeTrueDivToMulByInverse, MergeLinears, compose
from transformers import BertConfig, BertModel
from transformers.utils.fx import symbolic_trace

model = BertModel(
    BertConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
)
traced = symbolic_trace(model, input_names=["input_ids", "attention_mask", "token_type_ids"])
optimized = compose(ChangeTrueDivToMulByInverse(), MergeLinears())(traced)
