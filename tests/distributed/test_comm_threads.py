"""Pins that threads as ranks compute what processes do, and raise where processes would hang."""

from __future__ import annotations

import pytest
import torch
from comm_checks import check_group
from support.thread_group import ThreadGroup, ThreadGroups

from mstar_tp.common.errors import LockstepError, PeerLostError
from mstar_tp.distributed.comm import SingleGroup


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_over_threads_equals_single_process_maths(world_size: int) -> None:
    ThreadGroups(world_size).run(check_group)


def test_a_group_of_one_passes_the_same_checks() -> None:
    check_group(SingleGroup())


def test_sums_run_in_rank_order_so_they_are_bit_equal_every_time() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    for _ in range(20):
        for total in ThreadGroups(3).run(lambda group: group.all_reduce(parts[group.rank].clone())):
            assert torch.equal(total, (parts[0] + parts[1]) + parts[2])


def test_a_fast_rank_may_write_its_tensor_while_a_slow_one_still_reads() -> None:
    def main(group: ThreadGroup) -> list[float]:
        x = torch.zeros(1)
        seen = []
        for step in range(200):
            x.fill_(step + group.rank)
            seen.append(group.all_gather(x).sum().item())
            x.fill_(-1000)
        return seen

    for seen in ThreadGroups(2).run(main):
        assert seen == [2 * step + 1 for step in range(200)]


def test_ranks_in_different_collectives_are_an_error_on_all_of_them() -> None:
    causes = []

    def main(group: ThreadGroup) -> None:
        try:
            if group.rank == 0:
                group.all_reduce(torch.zeros(2))
            else:
                group.agree([1, 2])
        except LockstepError as error:
            causes.append(str(error))
            raise

    with pytest.raises(LockstepError, match=r"rank 0 entered all_reduce.*rank 1 entered agree"):
        ThreadGroups(2).run(main)
    assert len(causes) == 2


def test_a_collective_over_different_shapes_is_an_error() -> None:
    with pytest.raises(LockstepError, match="all_reduce"):
        ThreadGroups(2).run(lambda group: group.all_reduce(torch.zeros(2 + group.rank)))


def test_a_failing_rank_frees_the_others_and_its_error_is_the_one_raised() -> None:
    def main(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("rank 1's own fault")
        group.all_reduce(torch.zeros(1))

    with pytest.raises(ZeroDivisionError, match="own fault"):
        ThreadGroups(3).run(main)


def test_a_rank_that_never_comes_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(PeerLostError, match="rank 0 waited in agree"):
        ThreadGroups(2, wait_s=0.1)[0].agree([1])
