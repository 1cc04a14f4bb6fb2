"""ptflops https://github.com/sovrasov/flops-counter.pytorch#usage"""

from ptflops import get_model_complexity_info
from torchvision.models import resnet18

model = resnet18(weights=None)
macs, params = get_model_complexity_info(
    model, (3, 64, 64), as_strings=True, backend="pytorch", print_per_layer_stat=False, verbose=False
)
others = get_model_complexity_info(
    model, (3, 64, 64), as_strings=True, backend="aten", print_per_layer_stat=False, verbose=False
)
