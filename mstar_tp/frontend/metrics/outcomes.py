"""The values of labels: outcomes of requests, reasons of refusals and of groups' ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.wire.reports import Fatal, StartFailed


class Outcome(StrEnum):
    """The ways in which a request ends; ``REFUSED``: it was never taken."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"
    SLOW = "slow_reader"
    REFUSED = "refused"


class Refusal(StrEnum):
    """The reasons why a request for tokens is not taken."""

    QUEUE_FULL = "queue_full"
    NOT_READY = "not_ready"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    LIMITED = "limited"
    UNAUTHORIZED = "unauthorized"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    TIMEOUT = "timeout"
    INVALID = "invalid"
    FAULT = "fault"


_BY_CODE = {
    "queue_full": Refusal.QUEUE_FULL,
    "too_many_connections": Refusal.TOO_MANY_CONNECTIONS,
    "model_not_found": Refusal.UNKNOWN_MODEL,
}
_BY_STATUS = {
    401: Refusal.UNAUTHORIZED,
    403: Refusal.UNAUTHORIZED,
    404: Refusal.UNKNOWN_MODEL,
    408: Refusal.TIMEOUT,
    413: Refusal.TOO_LARGE,
    429: Refusal.LIMITED,
    431: Refusal.TOO_LARGE,
    503: Refusal.NOT_READY,
}


def refusal(error: ApiError) -> Refusal:
    """Return the reason why ``error`` turned a request away."""
    named = _BY_CODE.get(str(error.code)) or _BY_STATUS.get(error.status)
    return named or (Refusal.INVALID if error.status < 500 else Refusal.FAULT)


class GroupEnd(StrEnum):
    """The reasons why a group of ranks ends and is followed by another."""

    DIVERGED = "diverged"
    """A rank's tables differed from the leader's, or the schedule's order was broken."""
    HUNG = "hung"
    FAILED = "failed"
    START_FAILED = "start_failed"
    KILLED = "killed"
    EXITED = "exited"
    UNREACHABLE = "unreachable"
    ASKED_TO_STOP = "asked_to_stop"
    """A signal asked the ranks to stop, and every rank left in order."""
    OTHER = "other"


_BY_ERROR = {"LockstepError": GroupEnd.DIVERGED, "HungStep": GroupEnd.HUNG}
_CONSEQUENCE = "PeerLostError"
"""The error of ranks that end because another rank did."""


def group_end(said: Iterable[Fatal | StartFailed], losses: Collection[str]) -> GroupEnd:
    """Return the worst of the reasons that ranks ``said`` and that ``losses`` show."""
    found = {_said(report) for report in said} | {_lost(how) for how in losses}
    return next((end for end in GroupEnd if end in found), GroupEnd.OTHER)


def _said(report: Fatal | StartFailed) -> GroupEnd:
    if isinstance(report, StartFailed):
        return GroupEnd.START_FAILED
    if report.error == _CONSEQUENCE:
        return GroupEnd.OTHER
    return _BY_ERROR.get(report.error, GroupEnd.FAILED)


def _lost(how: str) -> GroupEnd:
    if not how.startswith("its process"):
        return GroupEnd.UNREACHABLE
    return GroupEnd.KILLED if "signal" in how else GroupEnd.EXITED
