"""pytorch-ignite https://docs.pytorch.org/ignite/quickstart.html"""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, EMAHandler, ProgressBar
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10))
loader = DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,))), batch_size=8)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
criterion = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, optimizer, criterion)
evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)})


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(loader)


stopper = EarlyStopping(patience=3, score_function=lambda engine: engine.state.metrics["accuracy"], trainer=trainer)
evaluator.add_event_handler(Events.COMPLETED, stopper)
saver = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver("saved", require_empty=False), n_saved=2)
trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
average = EMAHandler(model, momentum=0.01)
average.attach(trainer)
ProgressBar(disable=True).attach(trainer)
state = trainer.run(loader, max_epochs=2)
