"""skorch https://github.com/skorch-dev/skorch#example"""

import numpy
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from torch import nn


class MyModule(nn.Module):
    def __init__(self, num_units=2000):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, num_units), nn.ReLU(), nn.Linear(num_units, 100), nn.ReLU(), nn.Linear(100, 2))
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, X, **kwargs):
        return self.softmax(self.net(X))


X, y = numpy.random.randn(100, 20).astype(numpy.float32), numpy.random.randint(0, 2, 100)
net = NeuralNetClassifier(MyModule, max_epochs=2, lr=0.1, iterator_train__shuffle=True, verbose=0)
net.fit(X, y)
probabilities = net.predict_proba(X)
pipe = Pipeline([("scale", StandardScaler()), ("net", net)])
pipe.fit(X, y)
search = GridSearchCV(net, {"lr": [0.01, 0.02], "max_epochs": [1]}, refit=True, cv=2, scoring="accuracy")
search.fit(X, y)
