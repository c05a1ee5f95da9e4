"""All that a CUDA device must get right. ``scripts/gpu_check.py`` runs the same without pytest."""

from __future__ import annotations

import pytest
import torch
from support.device_checks import CHECKS, DeviceCheck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_the_device_gets_it_right(check: DeviceCheck) -> None:
    for module in check.modules:
        pytest.importorskip(module)
    check.run(torch.device("cuda", torch.cuda.current_device()), False)
