"""RabbitMQ and Mosquitto for tests, as Debian has them: processes on loopback, in directories of
their own. And a connection to them that can be cut.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from penstock.cli.certificates import TlsFiles
from tests.integration.ports import free_ports
from tests.support import wait_until

_SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_START_TIMEOUT_S = 100.0


def _program(name: str, package: str) -> str:
    found = shutil.which(name, path=_SYSTEM_PATH)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package {package})")
    return found


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _process(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield started
    finally:
        # A broker's script has children of its own, in its group.
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@contextmanager
def mosquitto(directory: Path, tls: TlsFiles | None = None) -> Iterator[int]:
    """Its port. Users: ann with password "secret"; and anybody without a name.

    With ``tls`` it speaks nothing else, and wants a certificate of the same authority.
    """
    program = _program("mosquitto", "mosquitto")
    (port,) = free_ports(1)
    passwords = directory / "passwords"
    passwords.write_text("ann:secret\n")
    maker = _program("mosquitto_passwd", "mosquitto")
    subprocess.run([maker, "-U", str(passwords)], check=True)
    settings = directory / "mosquitto.conf"
    settings.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npassword_file {passwords}\n"
        "persistence false\nmax_inflight_messages 0\nmax_queued_messages 0\n"
        # Started by root it would become a user who may not read here.
        f"user {'root' if os.geteuid() == 0 else ''}\n".replace("user \n", "")
    )
    if tls is not None:
        with settings.open("a") as file:
            file.write(f"cafile {tls.ca}\ncertfile {tls.certificate}\nkeyfile {tls.key}\n")
            file.write("require_certificate true\n")
    log = directory / "log"
    with _process([program, "-c", str(settings)], log) as running:
        wait_until(lambda: _listens(port) or running.poll() is not None, "mosquitto", 30)
        assert running.poll() is None, log.read_text()
        yield port


@contextmanager
def rabbitmq(directory: Path, tls: TlsFiles | None = None) -> Iterator[int]:
    """Its port. With ``tls`` it speaks nothing else, and wants a certificate of the same
    authority.
    """
    # Debian's command becomes another user; what it calls does not.
    _program("rabbitmq-server", "rabbitmq-server")
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    if not found:
        pytest.skip("rabbitmq-server is not where Debian's package rabbitmq-server has it")
    port, distribution, names = free_ports(3)
    settings = f"listeners.tcp.1 = 127.0.0.1:{port}\n"
    if tls is not None:
        settings = (
            f"listeners.tcp = none\nlisteners.ssl.1 = 127.0.0.1:{port}\n"
            f"ssl_options.cacertfile = {tls.ca}\nssl_options.certfile = {tls.certificate}\n"
            f"ssl_options.keyfile = {tls.key}\nssl_options.verify = verify_peer\n"
            "ssl_options.fail_if_no_peer_cert = true\n"
        )
    (directory / "rabbitmq.conf").write_text(settings)
    (directory / "plugins").write_text("[].\n")
    environment = {
        **os.environ,
        "HOME": str(directory),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"penstock{port}@localhost",
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    log = directory / "output"
    # Erlang's name server would stay behind as a daemon; ours is there before it is looked for.
    server = [_program("epmd", "erlang-base"), "-port", str(names), "-address", "127.0.0.1"]
    with _process(server, log, environment):
        wait_until(lambda: _listens(names), "epmd", 30)
        with _process([str(found[-1])], log, environment) as running:
            wait_until(
                lambda: _listens(port) or running.poll() is not None, "RabbitMQ", _START_TIMEOUT_S
            )
            assert running.poll() is None, log.read_text()
            yield port


class Cable:
    """Passes on what comes to its port, until it is cut; it can be plugged in again."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._is_cut = False
        self.refused = 0  # Connections that came while it was cut.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close what is open, and whatever comes."""
        with self._lock:
            self._is_cut = True
            for end in self._ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._ends.clear()

    def plug_in(self) -> None:
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        self.cut()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            with self._lock:
                if self._is_cut:
                    self.refused += 1
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    one.close()
