"""The simulation while the notebook uses a real device: its operations are seen, and none is disturbed."""

from __future__ import annotations

from tests.cuda.conftest import Notebook


def test_gradients_that_autograd_adds_up_in_its_own_thread(notebook: Notebook) -> None:
    """For tensors on a device the engine calls from a thread in which no Python code stands."""
    kernel = notebook()
    kernel.run("%gpumem simulate 16GiB").ok()
    kernel.run("net = Net().cuda(); x = net(torch.randn(8, 512).cuda()); (x.sum() + x.square().sum()).backward()").ok()
    kernel.run("%gpumem simulate off").ok()
