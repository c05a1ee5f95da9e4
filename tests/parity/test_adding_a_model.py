"""The model that docs/adding-a-model.md adds is right as it stands there: with the two lines that
the page asks for it gives the logits of transformers, and of PEFT with an adapter, on one and two
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.peft_kit import Case, check_rows, expect, prompt

from mstar_tp.models import registry
from mstar_tp.models.config import families
from mstar_tp.testing.tiny_models import fill_parameters, make_adapter

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
}
"""No multiplier is one, so one that is left out changes the logits."""


@pytest.fixture
def granite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from granite import GraniteForCausalLM
    from granite_config import read_granite

    monkeypatch.setitem(families.FAMILIES, "GraniteForCausalLM", read_granite)
    monkeypatch.setitem(registry.MODELS, "GraniteForCausalLM", GraniteForCausalLM)


@pytest.mark.usefixtures("granite")
def test_the_model_of_the_page_gives_the_logits_of_transformers_and_peft(tmp_path: Path) -> None:
    base = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES)).eval()
    fill_parameters(base, 3)
    base.save_pretrained(tmp_path / "base")
    folders = {"poet": make_adapter(tmp_path / "poet", tmp_path / "base", rank=4)}
    cases = [Case(None, prompt(13)), Case("poet", prompt(10)), Case("poet", prompt(5))]
    for case in cases:
        expect(case, base, folders.get(case.name or ""))
    for world_size in (1, 2):
        check_rows(cases, tmp_path / "base", folders, world_size)
