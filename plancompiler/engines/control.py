"""The connection between a launcher and the agents of its ranks: frames of JSON over TCP or TLS.

Both sides prove that they know the run's secret before anything else is read. The kernel asks a
silent other side whether it is there, so that a cable that is cut ends the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.engines.launch_variables import INSECURE, TLS
from plancompiler.engines.launcher import Program
from plancompiler.errors import SecurityError, TransportError
from plancompiler.limits import time_limits

SILENCE_SECONDS = time_limits.AGENT_SILENCE
"""An agent, or the way to it, says nothing before its ranks are lost."""
_HEAD = struct.Struct(">I")
_MAX_BYTES = 1 << 20
"""Of a frame. Lines of ranks are cut before."""
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_TLS_MISMATCH = (ssl.SSLCertVerificationError, FileNotFoundError, PermissionError)
"""What trying again does not mend; a launcher that ends meanwhile fails otherwise."""
Message = dict[str, Any]


class Connection:
    """One side of such a connection. One thread receives, any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        _ask_when_silent(sock)

    @property
    def own_host(self) -> str:
        """This side's address, by which hosts on the other side's network reach it."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; a connection that has ended takes none, as its reader will see."""
        data = json.dumps({"kind": kind, **fields}).encode()
        with self._lock, suppress(OSError):
            self._socket.sendall(_HEAD.pack(len(data)) + data)

    def receive(self) -> Message | None:
        """The next message; None when the other side is gone, silent or makes no sense."""
        try:
            (size,) = _HEAD.unpack(self._exactly(_HEAD.size))
            if size > _MAX_BYTES:
                return None
            message = json.loads(self._exactly(size))
        except (OSError, EOFError, ValueError):
            return None
        return message if isinstance(message, dict) and "kind" in message else None

    def patience(self, seconds: float | None) -> None:
        """How long `receive` waits for a message before the other side counts as gone."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """End it for both sides, also for a thread that is receiving."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    # --- proofs -----------------------------------------------------------------------------------

    def accept(self, secret: str) -> bool:
        """The launcher's side: whether the other one knows the secret. OSError or EOFError where it
        goes away or says nothing.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._socket.sendall(nonce)
        other = self._exactly(_NONCE_BYTES)
        proof = self._exactly(_PROOF_BYTES)
        if not secrets.compare_digest(proof, _proof(secret, b"agent", nonce, other)):
            return False
        self._socket.sendall(_proof(secret, b"launcher", nonce, other))
        return True

    def sign_in(self, secret: str) -> None:
        """The agent's side. SecurityError where the other one does not know the secret."""
        own, nonce = secrets.token_bytes(_NONCE_BYTES), b""
        try:
            nonce = self._exactly(_NONCE_BYTES)
            self._socket.sendall(own + _proof(secret, b"agent", nonce, own))
            proof = self._exactly(_PROOF_BYTES)
        except (OSError, EOFError):
            proof = b""
        if not secrets.compare_digest(proof, _proof(secret, b"launcher", nonce, own)):
            raise SecurityError(
                "the launcher does not know this run's secret",
                expected="the same secret on all hosts of a run",
                hint="give all of them the same --token-file",
            )


def _proof(secret: str, side: bytes, *nonces: bytes) -> bytes:
    """Shows that `side` knows the secret, and has heard both nonces."""
    return hmac.digest(secret.encode(), b"\0".join((side, *nonces)), "sha256")


def connect(address: str, secret: str, timeout: float) -> Connection:
    """To the launcher at an address. TransportError where nobody answers there, SecurityError where
    the two sides' secrets or TLS do not fit.
    """
    try:
        sock = socket.create_connection(split_address(address), timeout)
        sock = _secured(sock, address, as_server=False)
    except _TLS_MISMATCH as error:
        raise SecurityError(
            "the launcher of this rank cannot be reached with these files for TLS",
            got=f"{address}: {error}",
            hint=f"check {', '.join(TLS)} on both sides",
        ) from None
    except OSError as error:
        raise TransportError(
            "the launcher of this rank cannot be reached",
            got=f"{address}: {error}",
            hint="name an address with --address that all hosts of the run reach",
        ) from None
    connection = Connection(sock)
    try:
        connection.sign_in(secret)
    except SecurityError:
        connection.close()
        raise
    connection.patience(None)  # the kernel asks
    return connection


def write_program(program: Program, secret: str, world: str) -> dict[str, Any]:
    """A program for agents that know the run's secret. The program's own secret is hidden from who
    listens on the way by a pad, which nobody else can make and no other world has.
    """
    return asdict(program) | {
        "secret": None if program.secret is None else _hidden(program.secret, secret, world)
    }


def read_program(written: Mapping[str, Any], secret: str, world: str) -> Program:
    """What `write_program` wrote, with the Python of this host."""
    hidden = written["secret"]
    return Program(
        (sys.executable, *written["command"][1:]),
        written["environment"],
        None if hidden is None else _shown(hidden, secret, world),
        written["handles_signals"],
    )


def _hidden(text: str, secret: str, world: str) -> str:
    return _padded(text.encode(), secret, world).hex()


def _shown(hidden: str, secret: str, world: str) -> str:
    return _padded(bytes.fromhex(hidden), secret, world).decode()


def _padded(data: bytes, secret: str, world: str) -> bytes:
    key = hmac.digest(secret.encode(), b"program:" + world.encode(), "sha512")
    pad = hashlib.shake_256(key).digest(len(data))
    return bytes(each ^ other for each, other in zip(data, pad, strict=True))


def check_address(address: str) -> None:
    """SecurityError for an address that others could reach without TLS."""
    host = split_address(address)[0]
    if not is_loopback(host) and not tls_files() and os.environ.get(INSECURE, "0") == "0":
        raise SecurityError(
            "what launchers and ranks say to each other would cross the network in the clear",
            got=address,
            expected="a loopback address, or TLS with client certificates",
            hint=f"set {', '.join(TLS)}, or {INSECURE}=1 on a network you trust",
        )


def secured_server(sock: socket.socket, address: str) -> socket.socket:
    """An accepted connection, with TLS where the address needs it."""
    return _secured(sock, address, as_server=True)


def tls_files() -> Mapping[str, str]:
    """The user's files for TLS by the names of their variables in `TLS`; all or none."""
    files = {name: os.environ.get(name, "") for name in TLS}
    return files if all(files.values()) else {}


def _secured(sock: socket.socket, address: str, *, as_server: bool) -> socket.socket:
    host = split_address(address)[0]
    files = tls_files()
    if is_loopback(host) or not files:
        return sock
    ca, cert, key = (files[name] for name in TLS)
    purpose = ssl.Purpose.CLIENT_AUTH if as_server else ssl.Purpose.SERVER_AUTH
    context = ssl.create_default_context(purpose, cafile=ca)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    name = None if as_server else host
    return context.wrap_socket(sock, server_side=as_server, server_hostname=name)


def _ask_when_silent(sock: socket.socket) -> None:
    """The kernel asks, so that a process that is stopped by Ctrl-Z does not count as gone."""
    seconds = int(SILENCE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", seconds // 2 - 1),
        ("TCP_USER_TIMEOUT", 1000 * seconds),  # milliseconds
    ):
        if hasattr(socket, option):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
