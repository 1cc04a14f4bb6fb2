"""lpips https://github.com/richzhang/PerceptualSimilarity#quick-start"""

import lpips
import torch

loss_function = lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False)
distance = loss_function(torch.zeros(1, 3, 64, 64), torch.ones(1, 3, 64, 64))
