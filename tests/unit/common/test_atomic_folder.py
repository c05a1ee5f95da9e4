"""Pins where results are written: nothing that stands there is lost, and two that write one result
do not take each other's folder away.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mstar_tp.common.atomic_folder import FreshFolder
from mstar_tp.common.errors import OutputError


def fresh(out: Path, *, force: bool = False) -> FreshFolder:
    return FreshFolder(out, inputs=(), kind_file="kind.json", force=force)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("force", [False, True])
def test_what_came_meanwhile_is_not_replaced(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="choose another --out"), fresh(out, force=force) as new:
        (new / "kind.json").write_text("mine")
        out.mkdir()
        (out / "theirs").write_text("kept")
    assert (out / "theirs").read_text() == "kept"
    assert names(tmp_path) == ["out"]


def test_of_two_that_write_one_result_the_first_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="choose another --out"), fresh(out) as late:
        (late / "kind.json").write_text("late")
        with fresh(out) as early:
            (early / "kind.json").write_text("early")
    assert (out / "kind.json").read_text() == "early" and names(tmp_path) == ["out"]
    with fresh(out, force=True) as later:
        (later / "kind.json").write_text("later")
    assert (out / "kind.json").read_text() == "later" and names(tmp_path) == ["out"]


def test_a_folder_that_another_takes_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made, real = tmp_path / "out", [0], tempfile.mkdtemp

    def mkdtemp(**kwargs: Any) -> str:
        folder: str = real(**kwargs)
        made[0] += 1
        if made[0] == 1:
            with fresh(out, force=True):  # looks for leftovers before that one is locked
                pass
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(OutputError, match=r"has no kind\.json"), fresh(out, force=True) as folder:
        (folder / "kind.json").write_text("mine")
        (out / "theirs").write_text("")
    assert made[0] == 3 and names(tmp_path) == ["out"]


def test_a_leftover_that_goes_while_leftovers_are_searched_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / ".out.unfinished.gone"
    real = os.open
    gone.mkdir()

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path) == gone and gone.exists():
            gone.rmdir()
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    with fresh(tmp_path / "out") as folder:
        (folder / "kind.json").write_text("mine")
    assert names(tmp_path) == ["out"]
