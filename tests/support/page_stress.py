"""A storm of KV pages that move to host memory and back beside steps, on any device's two queues:
each step must find in its requests' pages what they wrote there.
"""

from __future__ import annotations

import random
from functools import partial

import torch

from mstar_tp.engine.resources.kv.host_copies import HostCopies
from mstar_tp.engine.resources.kv.host_pages import HostPages
from mstar_tp.engine.resources.kv.offload import KvOffload
from mstar_tp.layers.attention.attention import KVCache
from support.copy_stress import StressDevice

NUM_PAGES, NUM_HOST_PAGES, PAGE_SIZE = 7, 5, 2
REQUESTS = 40


def small_cache(device: torch.device) -> list[KVCache]:
    """Two layers of NUM_PAGES pages."""
    sizes = NUM_PAGES, PAGE_SIZE, 2, 3
    return [KVCache.allocate(*sizes, torch.float32, device) for _ in range(2)]


def wrong_pages(on: StressDevice, seed: int) -> int:
    """The number of rows of a stress run that found other contents in their pages."""
    chooser, kv = random.Random(seed), small_cache(on.device)
    offload = KvOffload(HostPages(NUM_HOST_PAGES), HostCopies(kv, NUM_HOST_PAGES, on.queues))
    wrong = torch.zeros((), dtype=torch.int64, device=on.device)
    free = list(range(NUM_PAGES))
    running: dict[int, list[int]] = {}
    for rid in range(REQUESTS):
        offload.copy_out()
        for other in offload.host.rids:
            if len(free) >= 2 and chooser.random() < 0.5:
                running[other] = [free.pop(0), free.pop(0)]
                offload.reload([(other, running[other])])
        if len(free) >= 2:
            running[rid] = [free.pop(0), free.pop(0)]
        for other, pages in running.items():
            # Like a step's own, made before it: no launch waits for them.
            index = torch.tensor(pages).to(on.device)
            on.launch(partial(_run, kv, index, other, None if other == rid else wrong))
        launched = on.queues.mark_steps()
        on.passes()
        while not launched.done():  # a victim's last step has ended
            on.passes()
        for victim in chooser.sample(sorted(running), k=min(len(running), chooser.randint(0, 2))):
            pages = running.pop(victim)
            free += pages
            if offload.host.fits(len(pages)):
                offload.offload(victim, pages)
    on.finish()
    return int(wrong)


def _run(kv: list[KVCache], pages: torch.Tensor, rid: int, wrong: torch.Tensor | None) -> None:
    """A request's share of a step; ``wrong``: None in its first, when its pages are anybody's."""
    for cache in kv:
        if wrong is not None:
            wrong += (cache.k[pages] != rid).any() | (cache.v[pages] != -rid).any()
        cache.k[pages], cache.v[pages] = float(rid), -float(rid)
