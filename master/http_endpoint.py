"""What a master answers over HTTP: its page at `/`, its metrics at `/metrics`, to those who show a
secret with the role operate, which they give as a bearer token or as the password of any user.

It reads one request of a connection, within bounds of time and size, and closes it.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import ssl
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.cluster.channel import TlsFiles, check_listenable
from plancompiler.cluster.token import OPERATE, Challenger
from plancompiler.errors import SecurityError
from plancompiler.limits import time_limits
from plancompiler.master.page import POLICY

_log = logging.getLogger(__name__)

_HEADER_BYTES = 16 << 10
_CONNECTIONS = 32
"""At the same time; more are closed at once."""
_HEADERS = (
    "Cache-Control: no-store",
    "Connection: close",
    f"Content-Security-Policy: {POLICY}",
    "Referrer-Policy: no-referrer",
    "X-Content-Type-Options: nosniff",
)
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
}
_PLAIN = "text/plain; charset=utf-8"

Answer = Callable[[], tuple[str, bytes]]
"""Makes a content type and a body."""


class _RefusedError(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class HttpEndpoint:
    """Listens at an address and answers for some paths. `refused` counts what it refuses."""

    def __init__(
        self,
        listen: str,
        tls: TlsFiles | None,
        challenger: Challenger,
        answers: Mapping[str, Answer],
        refused: Counter[str],
    ) -> None:
        self._host, self._port = split_address(listen)
        if tls is None and not is_loopback(self._host):
            raise SecurityError(
                "metrics on this address would show secrets of their readers to the network",
                got=listen,
                expected="a loopback address, or a master with TLS",
                hint="give --tls-ca, --tls-cert and --tls-key; --insecure does not count here",
            )
        self._tls = None if is_loopback(self._host) else tls
        self._context: ssl.SSLContext | None = None
        self._challenger = challenger
        self._answers = answers
        self._refused = refused
        self._open = 0
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    async def start(self) -> None:
        """Listen; ClusterError where that cannot be."""
        check_listenable(self.address, "the master's metrics")
        if self._tls is not None:
            self._tls.read()  # names a file that cannot be read
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._tls.ca)
            context.load_cert_chain(self._tls.cert, self._tls.key)
            context.verify_mode = ssl.CERT_REQUIRED
            self._context = context
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, limit=_HEADER_BYTES
        )
        self._port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Listen no longer."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        self._open += 1
        try:
            if self._open <= _CONNECTIONS:
                async with asyncio.timeout(time_limits.STREAM):
                    # Here and not before: who says nothing counts, and has no longer than others.
                    if self._context is not None:
                        await writer.start_tls(self._context)
                    writer.write(await self._answer(reader, f"{peer[0]}:{peer[1]}"))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, peer: str) -> bytes:
        extra: tuple[str, ...] = ()
        method = ""
        try:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            except asyncio.LimitOverrunError:
                raise _RefusedError(431, "the request is too long") from None
            method, path, headers = _parsed(head)
            if method not in ("GET", "HEAD"):
                raise _RefusedError(405, "this is only to be read")
            self._admit(headers.get("authorization", ""))
            answer = self._answers.get(path.partition("?")[0])
            if answer is None:
                raise _RefusedError(404, f"there is {' and '.join(self._answers)}")
            status, (kind, body) = 200, answer()
        except _RefusedError as error:
            status, kind, body = error.status, _PLAIN, f"{error}\n".encode()
            if status == 401:
                extra = ('WWW-Authenticate: Basic realm="plancompiler", charset="UTF-8"',)
            if status in (401, 403):
                self._refused[_REASONS[status].lower().replace(" ", "_")] += 1
                _log.warning("refused an HTTP request of %s: %s", peer, error, extra={"peer": peer})
        lines = (
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            *_HEADERS,
            *extra,
        )
        sent = b"" if method == "HEAD" else body
        return "\r\n".join((*lines, "", "")).encode("latin-1") + sent

    def _admit(self, authorization: str) -> None:
        """Raise where the request does not show a secret that may see everybody's jobs."""
        secret = _secret_of(authorization)
        if not secret:
            raise _RefusedError(401, "show the master's secret: as password, or as bearer token")
        try:
            caller = self._challenger.holder_of(secret)
        except SecurityError as error:
            raise _RefusedError(401, error.report.what) from None
        if OPERATE not in caller.roles:
            raise _RefusedError(403, f"{caller.name} may not do this: it lacks the role {OPERATE}")


def _parsed(head: str) -> tuple[str, str, Mapping[str, str]]:
    """Method, path and headers of a request."""
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _RefusedError(400, "this is no request of HTTP/1.1")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return words[0], words[1], headers


def _secret_of(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            return b64decode(value.strip(), validate=True).decode().partition(":")[2]
    return ""
