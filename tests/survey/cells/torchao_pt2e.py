"""torchao https://docs.pytorch.org/ao/stable/tutorials_source/pt2e_quant_qat.html"""

import torch
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
given = (torch.randn(4, 512),)
exported = torch.export.export(model, given).module()
quantizer = X86InductorQuantizer()
quantizer.set_global(get_default_x86_inductor_quantization_config())
prepared = prepare_pt2e(exported, quantizer)
prepared(*given)
quantized = convert_pt2e(prepared)
move_exported_model_to_eval(quantized)
answer = quantized(*given)
trained = prepare_qat_pt2e(
    torch.export.export(model.train(), given).module(),
    X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat=True)),
)
trained(*given)
