"""Tokenizers and chat templates that adapters' folders ship, in place of the base model's.

An adapter was trained with them, so its prompts are written with them. Their ids must be the base
model's: a tokenizer that gives one of its tokens another id is refused. What is read is kept for
the adapter's key; the event loop owns the table, and files are read on another thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path

from mstar_tp.common.confined_files import confined, read_file
from mstar_tp.common.errors import CheckpointError, RequestError
from mstar_tp.frontend.adapters.served_models import TEXT_FILES, ServedAdapter
from mstar_tp.frontend.text.template_process import BoundedTemplate
from mstar_tp.frontend.text.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    read_chat_template,
    read_special_tokens,
)
from mstar_tp.wire.values import AdapterKey

MAX_FILE_BYTES = 128 << 20
MAX_KEPT = 256
"""Adapters whose tokenizers stay in memory; most of those are the base model's own."""

_FAILURES = (
    CheckpointError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
)  # fmt: skip
"""The errors of reading a file that is missing, damaged or of another shape."""


class AdapterTokenizers:
    """The tokenizers of one base model's adapters."""

    def __init__(self, base: TextTokenizer, folder: str, roots: tuple[str, ...] = ()) -> None:
        """Take ``base``, the tokenizer of the base model in ``folder``.

        ``roots``: real paths of the folders that adapters loaded at run time must lie in, none:
        anywhere.
        """
        self._roots = roots or None
        self._base = base
        self._base_file = Path(folder) / "tokenizer.json"
        self._known: OrderedDict[AdapterKey, TextTokenizer] = OrderedDict()

    async def of(self, adapter: ServedAdapter) -> TextTokenizer:
        """Return what prompts and answers of ``adapter`` are written with.

        Raises:
            RequestError: what its folder ships does not go with the base model.
        """
        found = self._known.get(adapter.key)
        if found is None:
            found = await asyncio.to_thread(
                self.read, adapter.key.name, adapter.path, configured=adapter.configured
            )
            self._known[adapter.key] = found
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(adapter.key)
        return found

    def read(self, name: str, path: str, *, configured: bool = False) -> TextTokenizer:
        """Return what the adapter ``name`` in ``path`` ships, else the base model's.

        Reads files, of one that is not ``configured`` those in the roots alone.

        Raises:
            RequestError: it does not go with the base model.
        """
        with confined(None if configured else self._roots):
            return self._read(name, path)

    def _read(self, name: str, path: str) -> TextTokenizer:
        """Read as ``read`` does, wherever this thread may read.

        Raises:
            RequestError: it does not go with the base model.
        """
        folder = Path(path)
        try:
            shipped = [file for file in TEXT_FILES if (folder / file).is_file()]
            for file in shipped:
                if (folder / file).stat().st_size > MAX_FILE_BYTES:
                    raise CheckpointError(f"{folder / file}: larger than {MAX_FILE_BYTES} bytes")
            if "tokenizer.json" in shipped and not self._is_base(folder):
                tokenizer = load_tokenizer(
                    folder,
                    default_template=self._base.chat_template,
                    template_type=BoundedTemplate,
                )
                self._check(tokenizer, folder)
                return tokenizer
            template = read_chat_template(folder) if shipped else None
            if template is None or template == self._base.chat_template:
                return self._base
            return self._base.with_template(template)
        except _FAILURES as error:
            raise RequestError(
                f"adapter '{name}' ships a tokenizer or chat template that cannot be served: "
                f"{error}",
                param="lora_path",
            ) from None

    def _is_base(self, folder: Path) -> bool:
        """Return whether the tokenizer is the base's own, as tools copy it beside adapters."""
        file, base = folder / "tokenizer.json", self._base_file
        return (
            file.stat().st_size == base.stat().st_size
            and read_file(file) == base.read_bytes()
            and read_special_tokens(folder) == self._base.special_tokens
        )

    def _check(self, tokenizer: TextTokenizer, folder: Path) -> None:
        vocabulary = tokenizer.vocabulary()
        for token, id_ in self._base.vocabulary().items():
            if vocabulary.get(token) != id_:
                raise CheckpointError(
                    f"{folder / 'tokenizer.json'}: token {token!r} has id {vocabulary.get(token)}, "
                    f"and {id_} in the base model: save the base model's tokenizer, or none"
                )
