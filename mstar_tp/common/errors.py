"""Every error a user, an operator or a peer can cause, as one small hierarchy.

A message says what, where (file, key, rank, request), got against wanted, and the remedy. What only
a programmer can cause is an ``assert``.
"""


class MstarError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(MstarError, ValueError):
    """A serving option is missing, unknown or out of range; the message names its key."""


class CheckpointError(MstarError, ValueError):
    """A base-model folder cannot be loaded; the message names the file and the tensor."""


class AdapterError(MstarError, ValueError):
    """An adapter cannot be served exactly; the message names the file and the key."""


class OutputError(MstarError):
    """A result cannot be written where it was asked for; the message names the folder."""


class RequestError(MstarError, ValueError):
    """A client's request cannot be served; ``param`` is the request field at fault, or None."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WireError(MstarError):
    """A frame is malformed, out of order or from a stranger: fatal between ranks."""


class LockstepError(MstarError):
    """This rank's tables differ from the leader's, or an order rule was broken: never serve on."""


class RecordingError(MstarError, ValueError):
    """A recording cannot be read or replayed; the message names the file."""


class PeerLostError(MstarError):
    """A process this one depends on went away; the message names it."""
