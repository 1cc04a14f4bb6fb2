"""optuna https://github.com/optuna/optuna-examples/blob/main/pytorch/pytorch_simple.py"""

import optuna
import torch
from torch import nn

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    width = trial.suggest_int("width", 1000, 2000)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(trial.suggest_float("p", 0.1, 0.5)), nn.Linear(width, 10))
    rate = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    optimizer = getattr(torch.optim, trial.suggest_categorical("optimizer", ["Adam", "SGD"]))(model.parameters(), lr=rate)
    for step in range(3):
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.report(loss.item(), step)
        if trial.should_prune():
            raise optuna.exceptions.TrialPruned
    return loss.item()


study = optuna.create_study(direction="minimize")
study.optimize(objective, n_trials=8)
best = study.best_trial
