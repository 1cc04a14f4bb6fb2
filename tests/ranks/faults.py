"""Distributed programs with a planted fault, and some without: each a function that all ranks run.

What must be said of each is in `planted.py`. A line that must be named ends with a comment `# <- NAME`: the function's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def warm(times: int = 3) -> torch.Tensor:
    """Return a tensor after some calls that all ranks agree in."""
    x = torch.ones(4)
    for _ in range(times):
        dist.all_reduce(x)
    return x


def model(norm: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 2)]
    return DistributedDataParallel(nn.Sequential(*layers))


def batch() -> torch.Tensor:
    return torch.randn(6, 4)


def skips_before_a_barrier(rank: int, world: int) -> None:
    x = warm()
    if rank != 1:
        dist.all_reduce(x)  # <- skips_before_a_barrier
    dist.barrier()


def skips_in_the_fifth_round(rank: int, world: int) -> None:
    x = torch.ones(8)
    for step in range(9):
        if rank != 1 or step != 5:
            dist.broadcast(x, 0)  # <- skips_in_the_fifth_round
        dist.all_reduce(x)


def skips_one_of_many_alike(rank: int, world: int) -> None:
    x = torch.ones(1)
    if rank != 1:
        dist.all_reduce(x)  # <- skips_one_of_many_alike
    dist.all_reduce(x)
    dist.all_reduce(x)
    dist.all_reduce(x)


def another_type_at_one_line(rank: int, world: int) -> None:
    x = warm()
    call = dist.all_reduce if rank != 1 else partial(dist.broadcast, src=0)
    call(x)  # <- another_type_at_one_line
    dist.barrier()


def another_order(rank: int, world: int) -> None:
    x = warm()
    if rank != 1:
        dist.all_reduce(x)  # <- another_order
        dist.broadcast(x, 0)
    else:
        dist.broadcast(x, 0)
        dist.all_reduce(x)


def another_size(rank: int, world: int) -> None:
    warm()
    x = torch.ones(64 if rank == 1 else 16)
    dist.all_reduce(x)  # <- another_size
    dist.barrier()


def another_dtype(rank: int, world: int) -> None:
    warm()
    x = torch.ones(16, dtype=torch.float64 if rank == 1 else torch.float32)
    dist.all_reduce(x)  # <- another_dtype
    dist.barrier()


def another_size_to_broadcast(rank: int, world: int) -> None:
    warm()
    x = torch.ones(8 if rank == 1 else 32)
    dist.broadcast(x, 0)  # <- another_size_to_broadcast
    dist.barrier()


def another_root(rank: int, world: int) -> None:
    x = warm()
    dist.broadcast(x, 1 if rank == 1 else 0)  # <- another_root
    for _ in range(3):
        dist.all_reduce(x)
    dist.barrier()
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def logs_on_one_rank(rank: int, world: int) -> None:
    x = warm()
    for step in range(4):
        dist.broadcast(x, 0)
        if rank == 0 and step == 2:
            dist.all_reduce(x)  # <- logs_on_one_rank
    dist.barrier()


def waits_alone_for_a_checkpoint(rank: int, world: int) -> None:
    warm()
    if rank == 0:
        dist.barrier()  # <- waits_alone_for_a_checkpoint


def fewer_batches(rank: int, world: int) -> None:
    net = model()
    for _ in range(4 if rank == 1 else 6):
        net(batch()).sum().backward()  # <- fewer_batches


def fewer_batches_with_batchnorm(rank: int, world: int) -> None:
    net = model(norm=True)
    for _ in range(4 if rank == 1 else 6):
        net(batch()).sum().backward()  # <- fewer_batches_with_batchnorm
    dist.barrier()


def stops_early_by_its_own_loss(rank: int, world: int) -> None:
    net = model()
    for step in range(8):
        net(batch()).sum().backward()  # <- stops_early_by_its_own_loss
        if rank == 1 and step == 3:
            break
    dist.barrier()


def skips_a_batch_with_nan(rank: int, world: int) -> None:
    net = model()
    for step in range(5):
        loss = net(batch()).sum()
        if rank == 1 and step == 2:
            continue
        loss.backward()  # <- skips_a_batch_with_nan
    dist.barrier()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.body(x)
        return self.one(x) + self.other(x) if both else self.one(x)


def a_head_is_not_used(rank: int, world: int) -> None:
    net = DistributedDataParallel(TwoHeads())
    for step in range(5):
        net(batch(), rank != 1 or step < 2).sum().backward()  # <- a_head_is_not_used


def raises_on_one_rank(rank: int, world: int) -> None:
    x = warm()
    if rank == 1:
        raise ValueError("a broken image")  # <- raises_on_one_rank
    dist.all_reduce(x)


def is_killed(rank: int, world: int) -> None:
    x = warm()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)


def exits_in_between(rank: int, world: int) -> None:
    x = warm()
    if rank == 1:
        os._exit(3)
    dist.all_reduce(x)


def is_only_slow(rank: int, world: int) -> None:
    x = warm()
    until = time.monotonic() + 60
    while rank == 1 and time.monotonic() < until:
        sum(range(1000))
    dist.all_reduce(x)  # <- is_only_slow


def waits_for_a_lock(rank: int, world: int) -> None:
    x = warm()
    if rank == 1:
        threading.Event().wait(60)
    dist.all_reduce(x)  # <- waits_for_a_lock


def groups_in_another_order(rank: int, world: int) -> None:
    one, other = dist.new_group(list(range(world))), dist.new_group(list(range(world)))
    x = warm()
    first, second = (other, one) if rank % 2 else (one, other)
    dist.all_reduce(x, group=first)  # <- groups_in_another_order
    dist.all_reduce(x, group=second)


def a_message_is_not_sent(rank: int, world: int) -> None:
    x = warm()
    if rank == 0:
        dist.recv(x, 1)  # <- a_message_is_not_sent
    dist.barrier()


def both_wait_for_a_message(rank: int, world: int) -> None:
    x = warm()
    if rank < 2:
        dist.recv(x, 1 - rank)  # <- both_wait_for_a_message
        dist.send(x, 1 - rank)
    dist.barrier()


def leaves_a_metric_out(rank: int, world: int) -> None:
    net = model()
    for _ in range(3):
        net(batch()).sum().backward()
    if rank != 1:
        dist.all_gather([torch.zeros(2) for _ in range(world)], torch.ones(2))  # <- leaves_a_metric_out
    dist.barrier()


def leaves_objects_out(rank: int, world: int) -> None:
    warm()
    if rank != 1:
        dist.all_gather_object([None] * world, {"rank": rank})  # <- leaves_objects_out
    dist.barrier()


def in_a_group_of_its_own(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    x = warm()
    if rank == 0:
        dist.all_reduce(x, group=group)  # <- in_a_group_of_its_own
    if rank < 2:
        dist.broadcast(x, 0, group=group)


def leaves_a_shard_out(rank: int, world: int) -> None:
    warm()
    if rank != 1:
        dist.reduce_scatter(torch.ones(2), [torch.ones(2) for _ in range(world)])  # <- leaves_a_shard_out
    dist.barrier()


# --- programs in which nothing is wrong ---------------------------------------------------------------------------------------


def plain_steps(rank: int, world: int) -> None:
    net = model()
    for _ in range(20):
        net(batch()).sum().backward()


def steps_with_batchnorm(rank: int, world: int) -> None:
    net = model(norm=True)
    for _ in range(20):
        net(batch()).sum().backward()


def one_rank_is_ten_times_slower(rank: int, world: int) -> None:
    net = model()
    for _ in range(8):
        time.sleep(0.2 if rank == 1 else 0.02)
        net(batch()).sum().backward()


def uneven_batches_with_join(rank: int, world: int) -> None:
    from torch.distributed.algorithms.join import Join

    net = model()
    with Join([net]):
        for _ in range(4 + 6 * rank):
            net(batch()).sum().backward()


def an_unused_head_that_ddp_knows_of(rank: int, world: int) -> None:
    net = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    for step in range(8):
        net(batch(), rank != 1 or step < 2).sum().backward()


def messages_and_collectives(rank: int, world: int) -> None:
    x = warm()
    for _ in range(5):
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
        dist.all_reduce(x)


def groups_of_some(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    x = warm()
    for _ in range(10):
        if rank < 2:
            dist.all_reduce(x, group=group)
        dist.broadcast(x, 0)


def objects_and_gathers(rank: int, world: int) -> None:
    for _ in range(4):
        dist.all_gather_object([None] * world, "x" * (rank * 100))
        dist.gather(torch.ones(3), [torch.ones(3) for _ in range(world)] if rank == 0 else None)
        dist.scatter(torch.ones(3), [torch.ones(3) for _ in range(world)] if rank == 0 else None)
        dist.reduce(torch.ones(5), 0)


def gradients_are_accumulated(rank: int, world: int) -> None:
    net = model()
    for step in range(12):
        if step % 4:
            with net.no_sync():
                net(batch()).sum().backward()
        else:
            net(batch()).sum().backward()


def a_long_evaluation_on_one_rank(rank: int, world: int) -> None:
    net = model()
    net(batch()).sum().backward()
    if rank == 0:
        time.sleep(1.0)
    dist.barrier()
