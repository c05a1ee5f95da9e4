"""Promise: images that wait are bounded in bytes, and their room comes back when a request ends."""

from __future__ import annotations

import pytest

from mstar_tp.frontend.adapters.served_models import ServedModels
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.ranks import live_requests
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.frontend.ranks.request_handle import Submission
from mstar_tp.wire.channels import Lost
from mstar_tp.wire.commands import ConductorMessage, NewRequest
from mstar_tp.wire.reports import RankReport, Ready
from mstar_tp.wire.values import ImageInput, SamplingParams

READY = Ready(
    rank=0, vocab_size=9, max_model_len=9, num_pages=1, page_size=1, eos_token_ids=(1,), targets=()
)


class Sent:
    outbox_full = False

    def __init__(self) -> None:
        self.messages: list[ConductorMessage] = []

    def send_all(self, message: ConductorMessage) -> None:
        self.messages.append(message)

    async def receive(self) -> tuple[int, RankReport | Lost]:
        raise NotImplementedError


def test_images_past_the_bound_are_turned_away_until_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_requests, "MAX_IMAGE_BYTES", 20)
    link = Sent()
    conductor = Conductor(link, ServedModels(("base",), "m", {}), world_size=1, max_queue=99)
    conductor.group.take(0, READY)
    image = ImageInput(start=0, num_tokens=1, pixels=bytes(6))
    seen = Submission(
        prompt=(1,), images=(image,), params=SamplingParams(max_tokens=1), adapter=None
    )
    handle = conductor.submit([seen, seen, seen])
    assert isinstance(link.messages[0], NewRequest) and link.messages[0].images == (image,)
    with pytest.raises(ApiError, match="18 of at most 20 bytes of images") as error:
        conductor.submit([seen])
    assert error.value.status == 503 and "Retry-After" in error.value.headers
    conductor.submit([Submission(prompt=(1,), params=seen.params, adapter=None)])
    conductor.abort(handle, 1)
    conductor.submit([seen])
