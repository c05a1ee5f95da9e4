"""Threads that enter and leave dispatch modes in turn leave no flag of torch's set for others."""

from __future__ import annotations

import threading

from support.thread_group import dispatch_flags_restored
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode


def test_modes_that_overlap_on_two_threads_leave_the_flags_as_they_were() -> None:
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with TorchDispatchMode():
            first_in.set()
            assert second_in.wait(30)
        first_out.set()

    def second() -> None:
        assert first_in.wait(30)
        with TorchDispatchMode():
            second_in.set()
            assert first_out.wait(30)

    with dispatch_flags_restored():
        threads = [threading.Thread(target=each, daemon=True) for each in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert is_in_torch_dispatch_mode(), "what the second thread found when it came"
    assert not is_in_torch_dispatch_mode()
