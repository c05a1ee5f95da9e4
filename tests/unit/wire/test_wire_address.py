"""Pins where a channel may listen: a private folder, loopback, or one named interface with a
secret.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from mstar_tp.common.errors import ConfigError
from mstar_tp.wire.address import Bind
from mstar_tp.wire.curve import curve_from_secret

SECRET = "correct horse battery staple"


@pytest.fixture
def socket():
    context = zmq.Context()
    made = context.socket(zmq.ROUTER)
    yield made
    made.close(linger=0)
    context.term()


def test_ipc_listens_in_a_fresh_folder_of_this_user_alone_and_removes_it(socket) -> None:
    bind = Bind("ipc")
    folder = Path(bind.open(socket).removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    bind.close()
    assert not folder.exists()
    bind.close()


def test_two_servers_never_share_an_address(socket) -> None:
    first, second = Bind("ipc"), Bind("ipc")
    other = socket.context.socket(zmq.ROUTER)
    assert first.open(socket) != second.open(other)
    other.close(linger=0)
    first.close()
    second.close()


def test_a_socket_path_that_is_too_long_says_what_to_set(socket, tmp_path, monkeypatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        Bind("ipc").open(socket)
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://localhost", "tcp://lo", "tcp://[::1]:*"]
)
def test_loopback_needs_no_secret(text: str) -> None:
    Bind(text)


def test_a_tcp_address_says_the_port_it_got(socket) -> None:
    address = Bind("tcp://127.0.0.1").open(socket)
    assert address.startswith("tcp://127.0.0.1:") and int(address.rsplit(":", 1)[1]) > 0


@pytest.mark.parametrize("text", ["tcp://eth0", "tcp://10.1.2.3:5000", "tcp://[2001:db8::1]:5"])
def test_other_interfaces_are_refused_without_a_secret_naming_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--order-bind: .*MSTAR_TP_SECRET"):
        Bind(text, option="--order-bind")
    Bind(text, curve_from_secret(SECRET))


@pytest.mark.parametrize("text", ["tcp://*", "tcp://0.0.0.0:5000", "tcp://[::]:5000"])
def test_every_interface_at_once_is_refused_even_with_a_secret(text: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        Bind(text, curve_from_secret(SECRET))


@pytest.mark.parametrize("text", ["", "tcp", "tcp://", "udp://lo:1", "tcp://lo:http", "/tmp/x"])
def test_an_address_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted ipc or tcp://INTERFACE"):
        Bind(text)


def test_an_interface_that_is_not_there_is_a_config_error(socket) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        Bind("tcp://nosuchnic0", curve_from_secret(SECRET)).open(socket)


def test_equal_secrets_give_equal_keys_and_others_do_not() -> None:
    assert curve_from_secret(SECRET) == curve_from_secret(SECRET)
    assert curve_from_secret(SECRET) != curve_from_secret(SECRET + ".")


def test_a_short_secret_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigError, match="at least 16") as refused:
        curve_from_secret("hunter2")
    assert "hunter2" not in str(refused.value)


def test_keys_do_not_show_when_printed() -> None:
    curve = curve_from_secret(SECRET)
    assert curve.secret.decode() not in repr(curve)
