"""torchmetrics https://lightning.ai/docs/torchmetrics/stable/pages/quickstart.html"""

import torch
from torchmetrics import MetricCollection, MetricTracker
from torchmetrics.classification import BinaryPrecisionRecallCurve, MulticlassAccuracy, MulticlassAUROC
from torchmetrics.functional import pairwise_cosine_similarity
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchmetrics.regression import SpearmanCorrCoef

collection = MetricCollection([MulticlassAccuracy(num_classes=5), MulticlassAUROC(num_classes=5)])
tracker = MetricTracker(collection.clone())
curve, ranks, similarity = BinaryPrecisionRecallCurve(), SpearmanCorrCoef(), StructuralSimilarityIndexMeasure()
tracker.increment()
for _ in range(3):
    predictions, targets = torch.randn(50_000, 5).softmax(dim=-1), torch.randint(5, (50_000,))
    collection.update(predictions, targets)
    tracker.update(predictions, targets)
    curve.update(predictions[:, 0], targets % 2)
    ranks.update(predictions[:, 0], predictions[:, 1])
    similarity.update(torch.rand(2, 3, 64, 64), torch.rand(2, 3, 64, 64))
figures = collection.compute(), tracker.compute(), curve.compute(), ranks.compute(), similarity.compute()
pairs = pairwise_cosine_similarity(torch.randn(500, 40))
