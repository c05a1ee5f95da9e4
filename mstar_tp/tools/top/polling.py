"""A reading of a running server at one moment: /metrics, /debug/state and /health."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from prometheus_client.parser import text_string_to_metric_families

from mstar_tp.common.errors import MstarError

ANSWER_WITHIN_S = 5.0
MAX_ANSWER_BYTES = 64 << 20

Labels = tuple[tuple[str, str], ...]


class NoAnswerError(MstarError):
    """Nothing, or nothing of ours, answers where the server should."""


class SlotUse(NamedTuple):
    """One slot of rank 0. ``stage``: "" where the model has one."""

    stage: str
    slot: int
    adapter: str | None
    rows: int


@dataclass(frozen=True, slots=True)
class Reading:
    """``at``: by ``time.monotonic``. ``slots`` is None where ``no_slots`` says why."""

    at: float
    samples: Mapping[tuple[str, Labels], float]
    slots: list[SlotUse] | None = None
    no_slots: str = ""
    failed_reads: list[str] = field(default_factory=list)
    health: str = ""
    """The reason why no request is served; "" while they are."""

    def value(self, name: str, **labels: str) -> float | None:
        """One series of ours."""
        return self.samples.get((f"mstar_tp_{name}", tuple(sorted(labels.items()))))

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of ours with these labels, whatever others they have."""
        wanted = set(labels.items())
        return sum(
            value
            for (found, has), value in self.samples.items()
            if found == f"mstar_tp_{name}" and wanted <= set(has)
        )

    def values(self, name: str, label: str) -> dict[str, float]:
        """``total`` by the values of one label."""
        found: dict[str, float] = {}
        for (own, labels), value in self.samples.items():
            key = dict(labels).get(label)
            if own == f"mstar_tp_{name}" and key is not None:
                found[key] = found.get(key, 0.0) + value
        return found


class Reader:
    """Asks one server. Blocks while it does."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """``key``: what /debug/state needs.

        Raises:
            NoAnswerError: ``url`` is none.
        """
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise NoAnswerError(f"{url}: is no http:// or https:// URL of a server")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._open = build_opener(ProxyHandler({})).open

    def read(self) -> Reading:
        """Everything, now.

        Raises:
            NoAnswerError: what stands in the way.
        """
        text = self._get("/metrics").decode("utf-8", "replace")
        try:
            samples = {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        except ValueError:
            samples = {}
        if ("mstar_tp_ready", ()) not in samples:
            raise NoAnswerError(f"{self.url}: what answers there is no mstar-tp server")
        health = "" if samples["mstar_tp_ready", ()] else self._why_not_ready()
        slots, no_slots, failed = self._slots()
        return Reading(time.monotonic(), samples, slots, no_slots, failed, health)

    def _slots(self) -> tuple[list[SlotUse] | None, str, list[str]]:
        try:
            state = json.loads(self._get("/debug/state?limit=1"))
        except HTTPError as error:
            if error.code in (401, 403):
                return None, "slots need the server's key: give --admin-key (or --api-key)", []
            return None, f"slots: {_message_of(error)}", []
        except ValueError:
            return None, "slots: the server's tables cannot be read", []
        leader = state["ranks"][0]
        stages = [(stage["stage"], stage["slots"]) for stage in leader.get("other_stages", ())]
        stages.append(("", leader["slots"]))
        slots = [
            SlotUse(name, slot["slot"], _name(slot["adapter"]), len(slot["holders"]))
            for name, table in stages
            for slot in table
        ]
        failed = [
            f"{_name(read['adapter'])}: rank {read['rank']}: {read['cause']}"
            for read in leader["failed_reads"]
        ]
        return slots, "", failed

    def _why_not_ready(self) -> str:
        try:
            self._get("/health")
        except HTTPError as error:
            return _message_of(error)
        return ""

    def _get(self, route: str) -> bytes:
        """An answer's body.

        Raises:
            HTTPError: it is an error, and the route is not /metrics.
            NoAnswerError: there is none.
        """
        request = Request(self.url + route, headers=self._headers)
        try:
            with self._open(request, timeout=ANSWER_WITHIN_S) as answer:
                data: bytes = answer.read(MAX_ANSWER_BYTES)
                return data
        except HTTPError as error:
            if route != "/metrics":
                raise
            raise NoAnswerError(
                f"{self.url}: answers /metrics with status {error.code}: is it an mstar-tp server?"
            ) from None
        except (URLError, HTTPException, OSError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            cause = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise NoAnswerError(
                f"{self.url}: no server answers there: {cause}: start it, or name its address"
            ) from None


def _name(adapter: Any) -> str | None:
    return None if adapter is None else str(adapter["name"])


def _message_of(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"status {error.code}"
