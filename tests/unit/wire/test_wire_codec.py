"""Pins the wire's promise: any message round-trips; any other bytes are a WireError, never more."""

from __future__ import annotations

import subprocess
import sys
import types
import typing
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_tp.common.errors import WireError
from mstar_tp.wire import handshake
from mstar_tp.wire.codec import Codec, Frame, StreamNumbers, encode
from mstar_tp.wire.commands import Abort, ConductorMessage
from mstar_tp.wire.reports import FollowerReport, RankReport
from mstar_tp.wire.schedule import ScheduleEntry

STREAMS = {
    "conductor": ConductorMessage,
    "schedule": ScheduleEntry,
    "follower": FollowerReport,
    "rank": RankReport,
    "hello": handshake.Hello | handshake.Welcome | handshake.Refused | handshake.Heartbeat,
}
CODECS = {name: Codec[Any](union) for name, union in STREAMS.items()}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for a message class, or for the type of one of its fields."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return in_bounds(arguments[0], arguments[1])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([any_of(each) for each in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(any_of(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*[any_of(each) for each in arguments])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: any_of(hint) for name, hint in hints.items()})
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        type(None): st.none(),
    }[kind]


def in_bounds(kind: type, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Numbers that a field takes with these bounds."""
    if kind is int:
        assert isinstance(meta.ge, int) and meta.le is None
        return st.integers(meta.ge, 2**64 - 1)
    return st.floats(meta.ge, meta.le)


@st.composite
def frames(draw: st.DrawFn) -> tuple[str, Frame[Any]]:
    stream = draw(st.sampled_from(sorted(STREAMS)))
    count = st.integers(0, 2**63 - 1)
    return stream, Frame(draw(count), draw(count), draw(any_of(STREAMS[stream])))


@given(frames())
@settings(max_examples=150, deadline=None)
def test_any_message_comes_back_as_it_was_sent(drawn: tuple[str, Frame[Any]]) -> None:
    stream, frame = drawn
    assert CODECS[stream].decode(encode(frame.n, frame.epoch, frame.body), "a peer") == frame


@given(frames(), st.data())
@settings(max_examples=250, deadline=None)
def test_mutated_bytes_are_a_valid_message_or_a_wire_error_and_nothing_else(
    drawn: tuple[str, Frame[Any]], data: st.DataObject
) -> None:
    stream, frame = drawn
    sent = bytearray(encode(frame.n, frame.epoch, frame.body))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(sent)))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip" if at < len(sent):
                sent[at] = data.draw(st.integers(0, 255))
            case "cut":
                del sent[at : at + data.draw(st.integers(1, 8))]
            case _:
                sent[at:at] = data.draw(st.binary(max_size=8))
    try:
        decoded = CODECS[stream].decode(bytes(sent), "a peer")
    except WireError as error:
        assert "a peer" in str(error)
    else:
        assert isinstance(decoded.body, STREAMS[stream])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04}.",
        b"\x91" * 100_000,
        encode(0, 0, {"type": "Step"}),
        encode(0, 0, Abort(rid=1)) + b"\x00",
        encode(-1, 0, Abort(rid=1)),
        encode(0, 0, {"type": "Abort", "rid": 1, "more": 2}),
        encode(0, 0, {"type": "Abort", "rid": "1"}),
        msgspec.msgpack.encode([0, 0, Abort(rid=1), 4]),
    ],
)
def test_what_is_not_one_whole_conductor_frame_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="rank 3 sent a malformed frame"):
        CODECS["conductor"].decode(data, "rank 3")


def test_messages_take_their_fields_by_keyword_and_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        Abort(1)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Abort(rid=1).rid = 2  # type: ignore[misc]


def test_the_wire_the_config_and_the_shards_import_no_torch() -> None:
    source = (
        "import sys, mstar_tp.config, mstar_tp.distributed.shard, mstar_tp.wire.channels\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_frames_in_order_are_accepted() -> None:
    numbers = StreamNumbers("rank 1", epoch=2)
    assert all(numbers.accept(Frame(n, 2, None)) for n in range(5))


@pytest.mark.parametrize(("n", "what"), [(3, "lost"), (0, "repeated")])
def test_a_gap_or_a_repeat_says_who_sent_what_and_what_was_wanted(n: int, what: str) -> None:
    numbers = StreamNumbers("rank 1", epoch=2)
    numbers.accept(Frame(0, 2, None))
    with pytest.raises(WireError, match=f"rank 1 sent frame {n}, wanted frame 1.*{what}"):
        numbers.accept(Frame(n, 2, None))


def test_a_frame_of_a_dead_epoch_is_dropped_and_not_counted() -> None:
    numbers = StreamNumbers("rank 1", epoch=2)
    assert not numbers.accept(Frame(17, 1, None))
    assert numbers.accept(Frame(0, 2, None))


def test_a_frame_of_an_epoch_that_has_not_begun_is_an_error() -> None:
    with pytest.raises(WireError, match="rank 1 sent a frame of epoch 3, wanted epoch 2"):
        StreamNumbers("rank 1", epoch=2).accept(Frame(0, 3, None))
