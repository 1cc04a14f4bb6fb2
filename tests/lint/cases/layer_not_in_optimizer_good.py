import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_fn = nn.MSELoss()
loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).relu())


net = Net()
net.head = nn.Linear(8, 1)
net_optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for x, y in loader:
    net_optimizer.zero_grad()
    loss = loss_fn(net(x), y)
    loss.backward()
    net_optimizer.step()
