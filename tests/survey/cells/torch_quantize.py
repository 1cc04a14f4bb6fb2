"""torch https://docs.pytorch.org/docs/stable/quantization.html"""

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qat_qconfig_mapping, get_default_qconfig, quantize_dynamic
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
given = torch.randn(4, 512)
mapping = QConfigMapping().set_global(get_default_qconfig("x86"))
prepared = prepare_fx(model.eval(), mapping, (given,))
prepared(given)
quantized = convert_fx(prepared)
answer = quantized(given)
trained = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), (given,))
trained(given).sum().backward()
converted = convert_fx(trained.eval())
dynamic = quantize_dynamic(model.eval(), {nn.Linear})
