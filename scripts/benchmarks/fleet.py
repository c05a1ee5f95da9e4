"""A model and a fleet of adapters on disk: folders of a few kinds, whose files are linked.

Past ``folders`` of them, names share folders, so a hundred thousand adapters take little time and
disk to make; a server knows nothing of that, and checks each. *Alike*: made by one recipe, with one
header, as fleets are; *unlike*: each check is a full one, for no header stands twice among those
remembered.
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from mstar_tp.bench.models import Shape, make_adapters, make_model
from mstar_tp.lora.format.batch_checks import KNOWN_RECIPES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOLDERS = 1000
LINKS = 30_000
"""The most links of one file: file systems allow some 65,000."""


class Fleet:
    """Lives in ``folder``; adapters come when asked for, and stay."""

    def __init__(
        self, folder: Path, shape: Shape, rank: int, *, alike: bool = True, folders: int = FOLDERS
    ) -> None:
        self._folder = folder
        self._folders = folders
        self.model = make_model(folder / "model", shape)
        self.root = folder / "adapters"
        self._kinds = list(make_adapters(folder / "kinds", shape, 4, rank).values())
        self._made = 0
        if not alike:
            first = self._kinds[0]
            self._kinds = [self._unlike(first, number) for number in range(2 * KNOWN_RECIPES)]

    def adapters(self, prefix: str, count: int) -> dict[str, str]:
        """name -> folder of adapters that exist from now on."""
        found: dict[str, str] = {}
        for number in range(count):
            if number >= self._folders:
                found[f"{prefix}-{number:06}"] = found[f"{prefix}-{number % self._folders:06}"]
                continue
            kind = self._kinds[self._made % len(self._kinds)]
            name = f"{prefix}-{number:06}"
            home = self.root / name
            home.mkdir(parents=True)
            for file in (CONFIG, WEIGHTS):
                os.link(os.path.join(kind, file), home / file)
            found[name] = str(home)
            self._made += 1
            if self._made % (LINKS * len(self._kinds)) == 0:
                self._kinds = [self._copy(each) for each in self._kinds]
        return found

    def _copy(self, kind: str) -> str:
        """The same files once more, to be linked further."""
        home = Path(f"{kind}+")
        home.mkdir()
        for file in (CONFIG, WEIGHTS):
            (home / file).write_bytes(Path(kind, file).read_bytes())
        return str(home)

    def _unlike(self, kind: str, number: int) -> str:
        """The same weights under a header of its own."""
        home = self._folder / "kinds" / f"unlike-{number}"
        home.mkdir()
        os.link(os.path.join(kind, CONFIG), home / CONFIG)
        save_file(load_file(os.path.join(kind, WEIGHTS)), home / WEIGHTS, {"kind": str(number)})
        return str(home)
