"""pytorch-tabnet https://github.com/dreamquark-ai/tabnet#how-to-use-it"""

import numpy
from pytorch_tabnet.pretraining import TabNetPretrainer
from pytorch_tabnet.tab_model import TabNetClassifier

X, y = numpy.random.rand(256, 20).astype(numpy.float32), numpy.random.randint(0, 2, 256)
pretrainer = TabNetPretrainer(n_d=64, n_a=64, verbose=0)
pretrainer.fit(X, eval_set=[X], max_epochs=1, batch_size=128, virtual_batch_size=64, num_workers=0)
clf = TabNetClassifier(n_d=64, n_a=64, verbose=0)
clf.fit(
    X, y, eval_set=[(X, y)], max_epochs=2, batch_size=128, virtual_batch_size=64, num_workers=0, from_unsupervised=pretrainer
)
predictions = clf.predict(X)
explained, masks = clf.explain(X)
