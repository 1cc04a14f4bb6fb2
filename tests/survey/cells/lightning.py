"""lightning https://lightning.ai/docs/pytorch/stable/starter/introduction.html"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 512), nn.ReLU(), nn.Linear(512, 28 * 28))

    def training_step(self, batch, at):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


autoencoder = LitAutoEncoder()
loader = DataLoader(TensorDataset(torch.randn(32, 28 * 28)), batch_size=8)
trainer = lightning.Trainer(limit_train_batches=4, max_epochs=2, accelerator="cpu", enable_progress_bar=False)
trainer.fit(model=autoencoder, train_dataloaders=loader)
checkpoint = trainer.checkpoint_callback.best_model_path
loaded = LitAutoEncoder.load_from_checkpoint(checkpoint)
encoder = loaded.encoder.eval()
embeddings = encoder(torch.rand(4, 28 * 28))
