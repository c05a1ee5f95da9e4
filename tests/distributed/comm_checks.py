"""One rank of the group tests: runs every collective against single-process maths.

Started by torchrun (test_comm_gloo) or on a thread (test_comm_threads); an error is the failure.
"""

from __future__ import annotations

import os

import torch

from mstar_tp.distributed.comm import AgreeOp, CommGroup, JointGroups

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def rank_input(rank: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Rank's ``[4, 6]`` tensor (or an empty one): small whole numbers, so every dtype is exact."""
    base = (torch.arange(24) * (rank + 1) % 13 + rank).to(dtype)
    if layout == "transposed":
        return base.reshape(6, 4).t()
    if layout == "strided":
        wide = torch.full((4, 12), -1, dtype=dtype)
        wide[:, ::2] = base.reshape(4, 6)
        return wide[:, ::2]
    if layout == "empty":
        return base[:0].reshape(0, 6)
    return base.reshape(4, 6)


def check_collectives(group: CommGroup) -> None:
    for dtype in DTYPES:
        for layout in ("dense", "transposed", "strided", "empty"):
            _check_one(group, dtype, layout)


def _check_one(group: CommGroup, dtype: torch.dtype, layout: str) -> None:
    inputs = [rank_input(rank, dtype, layout) for rank in range(group.world_size)]
    where = f"rank {group.rank}, {dtype}, {layout}"

    def mine() -> torch.Tensor:
        return rank_input(group.rank, dtype, layout)

    x = mine()
    assert group.all_reduce(x) is x, where
    assert torch.equal(x, torch.stack(inputs).sum(0).to(dtype)), where
    for dim in (0, 1, -1):
        wanted = torch.cat(inputs, dim=dim)
        assert torch.equal(group.all_gather(mine(), dim=dim), wanted), where
        gathered = group.gather(mine(), dim=dim)
        if group.rank == 0:
            assert gathered is not None and torch.equal(gathered, wanted), where
        else:
            assert gathered is None, where
    x = mine()
    assert group.broadcast(x) is x, where
    assert torch.equal(x, inputs[0]), where
    assert torch.equal(mine(), inputs[group.rank]), where


def check_strided_neighbours_are_left_alone(group: CommGroup) -> None:
    """A collective on a view writes the view's elements and no others."""
    wide = torch.full((3, 8), 7.0)
    wide[:, 1::2] = float(group.rank)
    group.all_reduce(wide[:, 1::2])
    assert torch.equal(wide[:, ::2], torch.full((3, 4), 7.0))
    assert torch.equal(wide[:, 1::2], torch.full((3, 4), float(sum(range(group.world_size)))))


def check_agreements(group: CommGroup) -> None:
    rank, last = group.rank, group.world_size - 1
    big = 2**62
    assert group.agree([rank, -rank, big - rank]) == [0, -last, big - last]
    assert group.agree([rank, -rank], AgreeOp.MAX) == [last, 0]
    assert group.agree([]) == []
    joint = JointGroups(group)
    assert joint.agree([5, rank]) == [5, 0]
    assert joint.same([3, rank, -big]) == [True, group.world_size == 1, True]


def check_group(group: CommGroup) -> None:
    check_collectives(group)
    check_strided_neighbours_are_left_alone(group)
    check_agreements(group)


def main() -> None:
    from mstar_tp.distributed import start

    torch.set_num_threads(1)
    groups = start.init_groups(torch.device("cpu"))
    group = groups.tp
    assert group.world_size == int(os.environ["WORLD_SIZE"])
    assert group.rank == int(os.environ["RANK"])
    check_group(group)
    if group.rank == 0:
        start.publish("where", "ipc:///somewhere")
    assert start.lookup("where", 30) == "ipc:///somewhere"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    # Nobody leaves while another still reads from the store.
    groups.agree([0])
    start.destroy_groups()
    start.destroy_groups()
    print(f"rank {group.rank} of {group.world_size} passed", flush=True)


if __name__ == "__main__":
    main()
