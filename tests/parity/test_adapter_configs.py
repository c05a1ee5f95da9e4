"""Promise: any PEFT LoRA config of plain LoRA gives PEFT's logits, or is refused before it serves.

Random configs: which modules and how they are named, ranks, alphas, patterns, layers, exclusions,
biases, saved and trained rows, dtypes. PEFT makes and saves each adapter, engines of one, two and
four ranks load it while they run, and the logits of a prompt are compared; the base model's stay as
they were.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.lockstep_ranks import LockstepRanks
from support.moe_kit import with_linear_experts
from support.peft_kit import PARAMS, assert_close, engine_config, logits_of, prompt, tune

from mstar_tp.common.errors import AdapterError
from mstar_tp.testing.tiny_models import TARGETS, Family, make_tiny_model
from mstar_tp.wire.values import AdapterKey

PROMPT = prompt(13)
BATCH = 3
"""Adapters in a step."""
DTYPES = ("float32", "bfloat16", "float16")
PATTERNS = (
    "q_proj",
    "down_proj",
    "lm_head",
    "embed_tokens",
    "self_attn.k_proj",
    "layers.1.mlp.up_proj",
    "model.layers.0.self_attn.v_proj",
    "^model.layers.1.self_attn.o_proj",
    r"layers\.0\..*",
    r".*\.(gate|up)_proj",
)


def _targets() -> st.SearchStrategy[Any]:
    names = st.sampled_from([*TARGETS, "embed_tokens", "lm_head"])
    lists = st.lists(names, min_size=1, max_size=5, unique=True)
    full = st.sampled_from(["model.layers.1.mlp.down_proj", "self_attn.q_proj"])
    regexes = st.sampled_from([r".*layers\.1\..*_proj", r".*(q_proj|v_proj)", r".*\.0\.mlp\..*"])
    return st.one_of(
        lists, st.builds(lambda a, b: [*a, b], lists, full), regexes, st.just("all-linear")
    )


def _saved() -> st.SearchStrategy[dict[str, Any]]:
    ids = st.lists(st.integers(0, 210), min_size=1, max_size=4, unique=True)
    ends = st.lists(st.sampled_from(["embed_tokens", "lm_head"]), min_size=1, unique=True)
    return st.one_of(
        st.just({}),
        st.just({}),
        ids.map(lambda i: {"trainable_token_indices": i}),
        ids.map(lambda i: {"trainable_token_indices": {"embed_tokens": i, "lm_head": i[:1]}}),
        ends.map(lambda names: {"modules_to_save": names}),
        ends.map(lambda names: {"modules_to_save": ["input_layernorm", "model.norm", *names[:-1]]}),
    )


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    pattern = st.sampled_from(PATTERNS)
    ranks = st.dictionaries(pattern, st.integers(1, 8), max_size=3)
    config = {
        "target_modules": draw(_targets()),
        "r": draw(st.integers(1, 8)),
        "lora_alpha": draw(st.integers(1, 32)),
        "use_rslora": draw(st.booleans()),
        "lora_bias": draw(st.booleans()),
        "ensure_weight_tying": draw(st.booleans()),
        "rank_pattern": draw(ranks),
        "alpha_pattern": draw(st.dictionaries(pattern, st.integers(1, 32), max_size=3)),
        **draw(_saved()),
    }
    if isinstance(config["target_modules"], list):
        config["layers_to_transform"] = draw(st.sampled_from([None, None, 0, 1, [0, 1]]))
    if config.get("layers_to_transform") is not None:
        config["layers_pattern"] = draw(st.sampled_from([None, "layers", ["h", "layers"]]))
    exclusions = [None, None, ["k_proj"], ["layers.0.self_attn.q_proj"], r".*\.1\.mlp\..*"]
    config["exclude_modules"] = draw(st.sampled_from(exclusions))
    return config


@dataclass(repr=False)
class Engine:
    """Ranks that serve one base model, and load adapters as they come."""

    ranks: LockstepRanks
    loads: int = 0

    def load(self, folder: Path) -> AdapterKey:
        """Served from now on; AdapterError where it is refused, on every rank alike."""
        self.loads += 1
        key = AdapterKey(f"adapter-{self.loads}", 1)
        for engine in self.ranks.engines:
            assert engine.lora is not None
            (pool,) = engine.lora.pools
            record = pool.store.check(key.name, str(folder))
            pool.tables.registry.check(key)
            pool.tables.registry.checked(key, record)
            assert pool.loads.commit(key, str(folder)) is None
        return key

    def logits(self, keys: Sequence[AdapterKey | None]) -> list[torch.Tensor]:
        """Of the prompt on each adapter, all in one step; None is the base model."""
        rids = [self.ranks.open(PROMPT, PARAMS, key) for key in keys]
        for rid, key in zip(rids, keys, strict=True):
            assert key is None or self.ranks.wait_copies(rid) is None
        result = self.ranks.step([(rid, len(PROMPT)) for rid in rids])[0]
        assert not result.failed
        for rid in rids:
            self.ranks.remove(rid)
        return [logits_of(result.sampled[rid]) for rid in rids]


@dataclass(repr=False)
class Served:
    """One base model in transformers and on 1, 2 and 4 ranks."""

    base: Any
    engines: dict[int, Engine]
    folder: Path
    plain: torch.Tensor
    made: int = 0


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3", "qwen3_moe"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    torch.set_num_threads(1)
    name: Family = request.param
    folder = tmp_path_factory.mktemp(name)
    path = make_tiny_model(folder / "base", name, seed=3)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if name == "qwen3_moe":
        # PEFT of today stacks experts, and then knows fewer of these settings.
        base = with_linear_experts(base)
    engines = {
        tp: Engine(LockstepRanks(engine_config(path, {}, tp, slots=BATCH))) for tp in (1, 2, 4)
    }
    with torch.no_grad():
        plain = base(torch.tensor([PROMPT])).logits[0, -1]
    yield Served(base, engines, folder, plain)
    for engine in engines.values():
        engine.ranks.close()


def saved_by_peft(served: Served, config: dict[str, Any], dtype: str, seed: int) -> Path | None:
    """The adapter's folder, what was trained in ``dtype``; None where PEFT has no such adapter."""
    import peft

    try:
        lora = peft.LoraConfig(task_type="CAUSAL_LM", **config)
        tuned = peft.get_peft_model(copy.deepcopy(served.base), lora).eval()
    except (ValueError, TypeError, AttributeError):
        return None
    tune(tuned, seed)
    served.made += 1
    folder = served.folder / f"x{served.made}"
    tuned.save_pretrained(str(folder))
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for key, tensor in tensors.items():
        # A copy of a base weight has no effect here; PEFT would put the cast one into the model.
        if ".base_layer." not in key:
            tensors[key] = tensor.to(getattr(torch, dtype))
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def logits_of_peft(served: Served, folder: Path) -> torch.Tensor | None:
    """Of the prompt, from the file; None where PEFT cannot read what it saved: it sorts patterns,
    so another may come first.
    """
    import peft

    try:
        reread = peft.PeftModel.from_pretrained(copy.deepcopy(served.base), str(folder)).eval()
    except RuntimeError:
        return None
    with torch.no_grad():
        logits = reread(torch.tensor([PROMPT])).logits[0, -1]
    assert isinstance(logits, torch.Tensor)
    return logits


@settings(
    max_examples=6,
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drawn=st.lists(st.tuples(configs(), st.sampled_from(DTYPES)), min_size=BATCH, max_size=BATCH),
    seed=st.integers(0, 1000),
)
def test_any_plain_lora_config_gives_pefts_logits(
    served: Served, drawn: list[tuple[dict[str, Any], str]], seed: int
) -> None:
    """Several adapters run in one step, with a row of the base model between them."""
    wanted: list[tuple[Path, torch.Tensor, str]] = []
    for config, dtype in drawn:
        folder = saved_by_peft(served, config, dtype, seed)
        if folder is None:
            continue
        logits = logits_of_peft(served, folder)
        if logits is not None:
            wanted.append((folder, logits, f"{config} in {dtype}"))
            continue
        for engine in served.engines.values():
            with pytest.raises(AdapterError, match="wanted"):
                engine.load(folder)
    for tp, engine in served.engines.items():
        keys: list[AdapterKey | None] = [None]
        expected = [("the base between them", served.plain)]
        for folder, logits, what in wanted:
            try:
                keys.append(engine.load(folder))
                expected.append((what, logits))
            except AdapterError as refusal:
                # The one kind of these that is not served: a tied head with factors and trained
                # tokens.
                assert "the head is tied to the embedding, whose trained tokens" in str(refusal)
        for got, (what, logits) in zip(engine.logits(keys), expected, strict=True):
            assert_close(got, logits, f"tp {tp}: {what}")
