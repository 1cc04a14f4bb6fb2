"""The process groups that a rank knows, which are not only those it belongs to."""

from __future__ import annotations

from nbguard.training.ranks.flight_recorder import group_ranks


def test_a_rank_outside_of_a_group_knows_its_own_groups(torch_process: None) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)  # PyTorch's backend without other processes
    try:
        assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
        own = dist.new_group([2, 3])

        assert group_ranks() == ((dist.group.WORLD.group_name, (0, 1, 2, 3)), (own.group_name, (2, 3)))
    finally:
        dist.destroy_process_group()
