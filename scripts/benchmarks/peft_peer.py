"""The same requests through transformers and PEFT's mixed batches, offline.

Requests are cut into batches, one after the other: these libraries have no server and no continuous
batching. Needs transformers, and peft for adapters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mstar_tp.bench.load import Ask, Load, Outcome
from mstar_tp.common.errors import ConfigError

BASE = "__base__"
"""PEFT's name for rows without an adapter in a mixed batch."""


def load_peft(model: str, adapters: Mapping[str, str]) -> Any:
    """The model with all adapters, as a mixed batch needs it; transformers' own without any.

    Raises:
        ConfigError: a package is missing.
    """
    try:
        import transformers

        base: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        base.eval()
        if not adapters:
            return base
        import peft
    except ImportError as error:
        raise ConfigError(
            f"--peer peft needs transformers and peft ({error}): install mstar-tp[bench]"
        ) from error
    mixed: Any = None
    for name, path in adapters.items():
        if mixed is None:
            mixed = peft.PeftModel.from_pretrained(
                base, path, adapter_name=name, autocast_adapter_dtype=False
            )
        else:
            mixed.load_adapter(path, adapter_name=name, autocast_adapter_dtype=False)
    return mixed.eval()


class PeftMixed:
    """Serves loads in this process, on ``threads`` threads (None: torch's own number)."""

    def __init__(self, model: str, adapters: Mapping[str, str], threads: int | None) -> None:
        self._model = load_peft(model, adapters)
        self._mixed = bool(adapters)
        self._adapters = set(adapters)
        self._threads = threads
        import transformers

        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def run(self, asks: Sequence[Ask], load: Load) -> list[Outcome]:
        """Every ask, ``load.concurrency`` a batch; the outcomes in their order.

        Raises:
            ConfigError: prompts of one batch differ in length, or the load is an open loop.
        """
        if load.rate is not None:
            raise ConfigError("--peer peft takes whole batches: leave --rate out")
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            size = load.concurrency
            parts = [asks[first : first + size] for first in range(0, len(asks), size)]
            return [outcome for part in parts for outcome in self._batch(part, load.max_tokens)]
        finally:
            torch.set_num_threads(before)

    def _batch(self, asks: Sequence[Ask], max_tokens: int) -> list[Outcome]:
        rows = [self._ids(ask) for ask in asks]
        if len({len(row) for row in rows}) != 1:
            raise ConfigError("--peer peft: prompts of one batch have different lengths")
        ids = torch.tensor(rows)
        how: dict[str, Any] = {}
        if self._mixed:
            how["adapter_names"] = [
                ask.model if ask.model in self._adapters else BASE for ask in asks
            ]
        clock = _clock()
        sent_s = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[clock],
                **how,
            )
        texts = self._tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        return [
            Outcome(
                model=ask.model,
                sent_s=sent_s,
                pieces_s=list(clock.stamps),
                text=text,
                tokens=out.shape[1] - ids.shape[1],
                prompt_tokens=ids.shape[1],
            )
            for ask, text in zip(asks, texts, strict=True)
        ]

    def _ids(self, ask: Ask) -> list[int]:
        if not isinstance(ask.prompt, str):
            return ask.prompt
        return list(self._tokenizer(ask.prompt, add_special_tokens=False).input_ids)


def _clock() -> Any:
    from transformers import StoppingCriteria

    class Clock(StoppingCriteria):
        """Notes when each token came; never stops anything."""

        def __init__(self) -> None:
            self.stamps: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            self.stamps.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return Clock()
