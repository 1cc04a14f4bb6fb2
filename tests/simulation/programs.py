"""Programs that run on any device: on PyTorch's real CUDA allocator (the fake device) and, on the CPU, in the simulation.

Each is source code, as it also runs in a process of its own. `DEV` is the device, `check()` says where both are compared.
Only operations without temporaries of their own are used, but where a test is about those.
"""

from __future__ import annotations

CREATION = """
a = torch.empty(300, 1000, device=DEV); b = torch.zeros(700_000, device=DEV); c = torch.ones_like(a); check()
d = torch.full((5,), 2.0, device=DEV); e = a.new_empty(3_000_001, dtype=torch.uint8); f = torch.empty(0, device=DEV); check()
v = a.view(-1)[10:2000].reshape(10, 199).t(); w = a.expand(4, 300, 1000); check()
del a, v; check()
del w, b; g = torch.empty(12 << 20, device=DEV); h = torch.empty(2 << 20, device=DEV); del g; check()
i = [torch.empty(n * 1000, device=DEV) for n in range(1, 40)]; i = i[::3]; check()
j = c.clone(); k = c.contiguous(); l = c.t().contiguous(); m = c.double(); n = c.to(torch.float32); check()
"""

CHANGES = """
a = torch.zeros(1_000_000, device=DEV); a.add_(1).mul_(a); a[5:100] = 3; a.fill_(2); check()
r = torch.empty(10, device=DEV); r.resize_(2_000_000); check()
r.resize_(5); check()
o = torch.empty(0, device=DEV); torch.add(a, a, out=o); check()
s = torch.empty(0, device=DEV); s.set_(a); del a; check()
t = torch.empty(400_000, device=DEV); t.set_(o.untyped_storage()); check()
t.data = torch.empty(77_777, device=DEV); check()
p, q = torch.empty(600, 600, device=DEV).split(300); del p; check()
parts = torch.cat([s, s]).chunk(4); del s; check()
"""

MLP = """
net = torch.nn.Sequential(torch.nn.Linear(512, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 700), torch.nn.Tanh(),
    torch.nn.Linear(700, 10)).to(DEV)
check()
optimizer = OPTIMIZER
for _ in range(3):
    x = torch.empty(256, 512, device=DEV); check()
    y = net(x); check()
    loss = LOSS; check()
    loss.backward(); check()
    optimizer.step(); check()
    optimizer.zero_grad(); check()
del y, loss; check()
"""

ONCE, TWICE = "y.mean()", "(y * y).mean()"
"""Losses that use what the network gives once, and twice: then autograd adds up two gradients."""

OPTIMIZERS = {
    "SGD": "torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)",
    "momentum": "torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)",
    "Adam": "torch.optim.Adam(net.parameters(), lr=0.1, foreach=False)",
    "Adam foreach": "torch.optim.Adam(net.parameters(), lr=0.1, foreach=True)",
}

RESIDUAL = """
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__(); self.a, self.b = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))
net = torch.nn.Sequential(*[Block(500) for _ in range(4)]).to(DEV); tied = torch.empty(500, 500, device=DEV, requires_grad=True)
check()
for turn in range(3):
    x = torch.empty(700, 500, device=DEV, requires_grad=True)
    hidden = net(x); out = (hidden @ tied).tanh() @ tied; loss = (out * hidden + out).mean(); check()
    loss.backward(retain_graph=turn == 1); check()
    if turn == 1:
        loss.backward(); check()
    found = torch.autograd.grad((net(x) * x).sum(), [x, *net.parameters()]); check()
    for p in net.parameters():
        p.grad = None
check()
"""

KEPT = """
kept = []
y = torch.empty(500_000, device=DEV, requires_grad=True).exp(); u, v = y * 2, y * 3; check()
for each in (u, v):
    each.grad_fn.register_hook(lambda inputs, outputs: kept.append(inputs[0]))
(u + v).backward(y.detach()); check()
del kept, u, v, y; check()
"""

GROWING = """
net = torch.nn.Sequential(torch.nn.Linear(20, 200, False), torch.nn.Tanh(), torch.nn.Linear(200, 20, False)).to(DEV)
x = y = None
for n in range(1, 25):
    try:
        x = torch.empty(n * 2000, 20, device=DEV)
        y = net(x) + x; y.backward(y.detach() * y.detach())
    except torch.OutOfMemoryError:
        failed.append(n)
    x = y = None
    check()
"""

LOOP = """
kept, done = [], 0
for n in range(200):
    try:
        kept.append(torch.empty((n % 7 + 1) * 900_000 + n, device=DEV)); done += 1
    except torch.OutOfMemoryError:
        failed.append(n); del kept[::2]
    check()
"""
