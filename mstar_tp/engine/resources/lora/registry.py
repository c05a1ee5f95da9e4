"""Which adapters are known: checked, served, retiring. Equal on every rank but for checks under
way.

Main thread (readers only add a finished check), under the pool's lock. No torch.
"""

from __future__ import annotations

from mstar_tp.engine.trail import Trail
from mstar_tp.errors import LockstepError
from mstar_tp.lora.checkpoint import AdapterFile
from mstar_tp.wire.messages import AdapterKey


class AdapterRegistry:
    """Checked files wait for their commit; served ones may be named by new requests; retiring ones
    only by requests that live.
    """

    def __init__(self) -> None:
        self._checking: set[AdapterKey] = set()
        self._checked: dict[AdapterKey, AdapterFile] = {}
        self._served: dict[str, AdapterKey] = {}
        self._files: dict[AdapterKey, AdapterFile] = {}
        self._trail = Trail()

    def check(self, key: AdapterKey) -> None:
        """A load's header check is under way."""
        self._checking.add(key)

    def checked(self, key: AdapterKey, file: AdapterFile | None) -> None:
        """The check is over: ``file`` when it passed. One that was aborted meanwhile leaves
        nothing.
        """
        if key in self._checking and file is not None:
            self._checked[key] = file
        self._checking.discard(key)

    def abort(self, key: AdapterKey) -> None:
        """The load was refused somewhere: forget its check, also one still under way."""
        self._checking.discard(key)
        self._checked.pop(key, None)

    def commit(self, key: AdapterKey, path: str) -> str | None:
        """Serve ``key`` from here on; or why not.

        Raises:
            LockstepError: this rank never accepted the load, so it cannot have been committed.
        """
        file = self._checked.pop(key, None)
        served = self._served.get(key.name)
        if served is not None:
            return f"adapter {key.name!r} is served already, as {served}: unload it first"
        if file is None:
            raise LockstepError(f"adapter {key} ({path}) is committed, but was never accepted here")
        self._served[key.name] = key
        self._files[key] = file
        self._note(1, key)
        return None

    def file(self, key: AdapterKey) -> AdapterFile | None:
        """The registered file of a served or retiring adapter."""
        return self._files.get(key)

    def served(self, key: AdapterKey) -> bool:
        """Whether a new request may name ``key``."""
        return self._served.get(key.name) == key

    def keys(self) -> list[AdapterKey]:
        """Every served adapter, in the order they came."""
        return list(self._served.values())

    def retire(self, key: AdapterKey) -> bool:
        """No new request may name ``key``; whether it was served."""
        if not self.served(key):
            return False
        del self._served[key.name]
        self._note(2, key)
        return True

    def retiring(self, key: AdapterKey) -> bool:
        return key in self._files and not self.served(key)

    def forget(self, key: AdapterKey) -> None:
        """The last request on a retired adapter has ended."""
        if self._files.pop(key, None) is not None:
            self._note(3, key)

    def hash(self) -> int:
        """Running hash over what was served, retired and forgotten (R8)."""
        return self._trail.value()

    def _note(self, change: int, key: AdapterKey) -> None:
        self._trail.add(change)
        self._trail.add_text(str(key))
