"""The names that files give a model's modules. No torch.

A module's own name is its path in the model. Checkpoints and adapters of several years spell parts
of it otherwise: vision-language models keep the decoder under ``language_model`` and the like. The
loader and adapters go by the same rules, so adapters are placed exactly as weights are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """The renaming of checkpoint names to the model's.

    ``prefixes`` are (as files spell it, as the model does), whole dotted words; the longest that
    fits a name renames it. ``words`` are renamed wherever they stand after that.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    words: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        spelled = [prefix for prefix, _ in self.prefixes]
        assert all(spelled) and len(set(spelled)) == len(spelled), f"prefixes are {spelled}"

    def own(self, name: str) -> str:
        """The model's own name of a file's key or module."""
        fitting = [rule for rule in self.prefixes if starts_with(name, rule[0])]
        if fitting:
            spelled, own = max(fitting, key=lambda rule: len(rule[0]))
            name = join_words((own, rest_of(name, spelled)))
        if not self.words:
            return name
        renamed = dict(self.words)
        return ".".join(renamed.get(word, word) for word in name.split("."))


AS_BUILT = CheckpointRules()
"""Files spell every module as the model does."""


def starts_with(path: str, prefix: str) -> bool:
    """True if ``path`` is ``prefix`` or lies under it; everything lies under the empty one."""
    return not prefix or path == prefix or path.startswith(f"{prefix}.")


def rest_of(path: str, prefix: str) -> str:
    """The rest of a path behind ``prefix``; empty for the prefix itself."""
    assert starts_with(path, prefix), f"{path} is not under {prefix}"
    return path[len(prefix) :].removeprefix(".") if prefix else path


def join_words(parts: Iterable[str]) -> str:
    """The parts as one dotted path; empty ones are left out."""
    return ".".join(part for part in parts if part)
