"""Rounds of an action on the device, where autograd's engine runs in a thread of its own that has no Python code."""

from __future__ import annotations

import json

import pytest

from tests.cuda.conftest import Notebook

pytestmark = pytest.mark.fakecuda

_STEP = """
import torch
net, kept = torch.nn.Linear(512, 512).to('cuda'), []
def step():
    net.zero_grad()
    net(torch.ones(8, 512, device='cuda')).sum().backward()
    kept.append(net.weight.grad)
"""


def test_a_round_with_a_backward_pass_names_the_line_that_called_it(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(_STEP).ok()

    report = json.loads(kernel.run("%gpumem leak --json 3 step()").ok().text)

    assert report["rounds"][1:] == [512 * 512 * 4] * 2
    assert [(left["holder"], left["line"]) for left in report["left"]] == [("kept[2]", "In[3], line 5 in step()")]
