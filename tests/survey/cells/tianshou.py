"""tianshou https://tianshou.org/en/stable/01_user_guide/00_dqn.html"""

import gymnasium
import numpy
import torch
from tianshou.data import Batch, Collector, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net

env = gymnasium.make("CartPole-v1")
environments = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(2)])
net = Net(state_shape=(4,), action_shape=2, hidden_sizes=[512, 512, 512])
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
logits, state = net(numpy.zeros((3, 4), dtype=numpy.float32))
buffer = VectorReplayBuffer(2000, 2)
batch = Batch(a=torch.randn(300, 400), b=Batch(c=torch.randn(300, 400)))
joined = Batch.cat([batch, batch])
logits.sum().backward()
optimizer.step()
