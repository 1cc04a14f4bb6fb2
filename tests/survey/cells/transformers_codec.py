"""transformers https://huggingface.co/docs/transformers/model_doc/xcodec"""

import torch
from transformers import XcodecConfig, XcodecModel

codec = XcodecModel(XcodecConfig())
codes = codec.encode(torch.zeros(1, 1, 8000)).audio_codes
