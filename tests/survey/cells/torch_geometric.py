"""torch_geometric https://github.com/pyg-team/pytorch_geometric#quick-tour-for-new-users"""

import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class GCN(torch.nn.Module):
    def __init__(self, given, hidden, out):
        super().__init__()
        self.conv1 = GCNConv(given, hidden, cached=True)
        self.conv2 = GCNConv(hidden, out, cached=True)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


data = Data(x=torch.randn(2000, 128), edge_index=torch.randint(0, 2000, (2, 9000)), y=torch.randint(0, 4, (2000,)))
model = GCN(128, 256, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    prediction = model(data.x, data.edge_index)
    loss = functional.cross_entropy(prediction, data.y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
loader = DataLoader([data.clone() for _ in range(4)], batch_size=2)
for batch in loader:
    pooled = global_mean_pool(batch.x, batch.batch)
explainer = Explainer(
    model=model,
    algorithm=GNNExplainer(epochs=3),
    explanation_type="model",
    node_mask_type="attributes",
    edge_mask_type="object",
    model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
)
explanation = explainer(data.x, data.edge_index, index=3)
