"""An instance of thread-ranks with everything that may befall it, and what must hold at its end."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Literal

from support.thread_instance import ThreadInstance
from trails import check_rest

from mstar_tp.wire.values import AdapterKey

NAMES = "abcdef"
Damage = Literal["gone", "truncated", "other"]
DAMAGES: tuple[Damage, ...] = ("gone", "truncated", "other")


class Faults:
    """Asks, breaks and mends; remembers what each request was promised."""

    def __init__(self, instance: ThreadInstance) -> None:
        self.instance = instance
        self.generation = 0
        self.damaged: dict[tuple[AdapterKey, int], bytes] = {}
        self.spoilt: set[AdapterKey] = set()
        """Adapters that were ever damaged, or differ between ranks."""
        self.asked: dict[int, int] = {}
        self.stale: list[AdapterKey] = []
        """Keys that the frontend may have resolved before they were unloaded, or too early."""

    def keys(self) -> list[AdapterKey | None]:
        """What a request may name now."""
        late = (*self.stale[-1:], *self.instance.replaced[-1:])
        return [None, *self.instance.served.values(), *late]

    def submit(
        self, key: AdapterKey | None, prompt: int, max_tokens: int, stops: bool, images: int = 0
    ) -> int:
        """``stops``: its first token ends it, which nobody can know before it is sampled."""
        codes = (0, *((self.instance.codes[key],) if key is not None else ()))
        more: dict[str, Any] = {"stop_token_ids": codes} if stops else {}
        rid = self.instance.submit(key, prompt, images, max_tokens=max_tokens, **more)
        self.asked[rid] = max_tokens
        return rid

    def load(self, name: str, differs_on: int | None = None, *, in_place: bool = False) -> None:
        self.generation += 1
        key = AdapterKey(name, self.generation)
        self.instance.load(key, differs_on=differs_on, in_place=in_place)
        self.stale.append(key)
        if differs_on is not None:
            self.spoilt.add(key)

    def unload(self, name: str) -> None:
        self.stale.append(self.instance.served[name])
        self.instance.unload(self.instance.served[name])

    def damage(self, key: AdapterKey, rank: int, kind: Damage) -> None:
        """Break the adapter's file on one rank."""
        if (key, rank) in self.damaged:
            return
        file = self._file(key, rank)
        content = self.damaged[key, rank] = file.read_bytes()
        self.spoilt.add(key)
        if kind == "gone":
            file.unlink()
        elif kind == "truncated":
            file.write_bytes(content[: len(content) // 2])
        else:
            file.write_bytes(content[::-1])

    def restore(self, key: AdapterKey, rank: int) -> None:
        self._file(key, rank).write_bytes(self.damaged.pop((key, rank)))

    def _file(self, key: AdapterKey, rank: int) -> Path:
        return self.instance.path(key, rank) / "adapter_model.safetensors"

    def check(self) -> None:
        """Let everything come to rest. A request fails for a reason of its own, one that ran to its
        end has all its tokens, nobody waits, and the ranks are one.
        """
        self.instance.settle(seed=1)
        for rid, ending in self.instance.endings.items():
            key = self.instance.adapter_of[rid]
            if ending.how == "failed":
                assert key is not None, f"a base request failed: {ending.cause}"
                assert repr(key.name) in ending.cause
                gone = key in self.stale or key in self.instance.replaced
                unloaded = gone and "was unloaded" in ending.cause
                assert unloaded or (key in self.spoilt and "rank" in ending.cause), ending.cause
            elif ending.how == "length":
                assert ending.tokens == self.asked[rid]
        check_rest(self.instance)

    def check_bounds(self) -> None:
        """What holds at any moment."""
        for rank in self.instance.ranks:
            for pool in rank.lora.pools:
                store, capacity = pool.store, pool.spec.cpu_capacity
                assert store.cpu_cache.used <= capacity
                assert store.budget.peak <= capacity, "reads in flight included"
                assert store.num_copies <= len(store.cpu_cache)
                assert pool.reports.steps_waited_for_read == 0

    def stress(self, seed: int, requests: int) -> None:
        """Ask for ``requests`` requests, with everything else in between, as ``seed`` says."""
        draw, instance = Random(seed), self.instance
        while len(self.asked) < requests:
            what = draw.random()
            if what < 0.5:
                key = draw.choice(self.keys())
                prompt, max_tokens, stops = (
                    draw.randint(1, 5),
                    draw.randint(1, 4),
                    draw.random() < 0.2,
                )
                images = draw.randint(0, prompt) if len(instance.specs) > 1 else 0
                self.submit(key, prompt, max_tokens, stops, images)
            elif what < 0.6 and instance.live:
                instance.abort(draw.choice(sorted(instance.live)))
            elif what < 0.66:
                differs = draw.choice((None, None, None, *range(1, instance.world_size)))
                self.load(draw.choice(NAMES), differs, in_place=draw.random() < 0.5)
            elif what < 0.72 and instance.served:
                self.unload(draw.choice(sorted(instance.served)))
            elif what < 0.76 and instance.codes:
                key = draw.choice(sorted(instance.codes))
                self.damage(key, draw.randrange(instance.world_size), draw.choice(DAMAGES))
            elif what < 0.82 and self.damaged:
                self.restore(*draw.choice(sorted(self.damaged)))
            elif what < 0.86:
                instance.stalled ^= {draw.randrange(instance.world_size)}
            else:
                instance.run(draw.getrandbits(16), draw.randint(1, 40) * instance.world_size)
                self.check_bounds()
