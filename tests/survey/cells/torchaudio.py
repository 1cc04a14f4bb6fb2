"""torchaudio https://docs.pytorch.org/audio/stable/tutorials/audio_feature_extractions_tutorial.html"""

import torch
import torchaudio
from torchaudio import functional, transforms

wave = torch.randn(1, 16_000)
spectrogram = transforms.Spectrogram(n_fft=1024)(wave)
mel = transforms.MelSpectrogram(sample_rate=16_000, n_fft=1024, n_mels=64)(wave)
back = transforms.GriffinLim(n_fft=1024, n_iter=3)(spectrogram)
coefficients = transforms.MFCC(sample_rate=16_000)(wave)
resampled = functional.resample(wave, 16_000, 8_000)
model = torchaudio.models.wav2vec2_base(aux_num_out=10).eval()
logits, _ = model(wave)
