"""How client, master and workers set up gRPC: limits, keepalive, TLS, and errors across calls."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.cluster.call_apart import call_apart
from plancompiler.cluster.codec import decode, encode
from plancompiler.cluster.tls_trouble import tls_trouble
from plancompiler.cluster.token import NONCE_BYTES, Credential, find_credential
from plancompiler.errors import (
    ClusterError,
    DeadlineError,
    ErrorReport,
    LimitError,
    MasterUnreachableError,
    PlanCompilerError,
    SecurityError,
)
from plancompiler.ir.closing import Closing
from plancompiler.limits import time_limits
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import SignInStub

MAX_MESSAGE_BYTES = 4 << 20
"""Of one gRPC message, either way; anything larger goes in chunks."""
_PROBE_SECONDS = time_limits.PROBE
"""How long the check of why a TLS connection fails may take."""
CALL_SECONDS = time_limits.CALL
"""Deadline of a call that is not a stream."""
SILENCE_SECONDS = time_limits.SILENCE
"""How long the other side of a connection may answer no ping."""
TRANSFER_SERVICE = "plancompiler.proto.Transfer"
FETCH_METHOD = "Fetch"
"""Called without generated code, so that chunks stay serialised."""
_CLOSE_SECONDS = time_limits.CHANNEL_END
SESSION_KEY = "plancompiler-session-bin"
"""The metadata with which a call shows its session."""
_CODES: dict[type[PlanCompilerError], grpc.StatusCode] = {
    SecurityError: grpc.StatusCode.PERMISSION_DENIED,
    LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_OTHERS = grpc.StatusCode.FAILED_PRECONDITION
"""The gRPC status of each error, for callers that do not read reports."""
_REPORT_KEY = "plancompiler-report-bin"

_log = logging.getLogger(__name__)

SHORTEST_SILENCE = time_limits.SHORTEST_SILENCE
"""A silence in seconds below which busy hosts would pass for lost ones."""


def silence_options(seconds: float) -> list[tuple[str, int]]:
    """Options that end a connection whose other side answers no ping for so many seconds, at
    least SHORTEST_SILENCE. gRPC answers in threads of its own, so a process whose interpreter is
    held answers, and a stopped process does not.
    """
    milliseconds = max(seconds, SHORTEST_SILENCE) * 1000
    # A ping goes out when nothing came between two looks, so up to two intervals after the last
    # byte; then both layers wait for its answer, one after the other.
    interval, answer = round(0.15 * milliseconds), round(0.35 * milliseconds)
    return [
        ("grpc.keepalive_time_ms", interval),
        # The first bounds the answer of the transport below HTTP/2, the second that of HTTP/2.
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),
    ]


_RECONNECT_SECONDS, _LONGEST_RECONNECT_SECONDS = 0.1, 1.0
"""How long a channel that is not connected waits before it tries again; twice as long each time."""
_SHORTEST_PING_MS = round(SHORTEST_SILENCE * 75)
"""What a server lets pass between two pings of a client: half of what clients leave."""
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # A master that was started again is found soon.
    ("grpc.initial_reconnect_backoff_ms", round(_RECONNECT_SECONDS * 1000)),
    ("grpc.max_reconnect_backoff_ms", round(_LONGEST_RECONNECT_SECONDS * 1000)),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *silence_options(SILENCE_SECONDS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", _SHORTEST_PING_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the authority that signed the other side's certificate, and one's own pair."""

    ca: Path
    cert: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Contents of authority, certificate and key; a SecurityError names an unreadable file."""
        contents = []
        for path in (self.ca, self.cert, self.key):
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise SecurityError(
                    "a TLS file cannot be read", got=f"{path}: {error.strerror}"
                ) from error
        return contents[0], contents[1], contents[2]


def check_exposure(address: str, tls: TlsFiles | None, insecure: bool) -> None:
    """Refuse to serve beyond this machine without TLS, unless told to."""
    host, _ = split_address(address)
    if tls is None and not insecure and not is_loopback(host):
        raise SecurityError(
            "serving on this address would let anyone on the network run jobs here",
            got=address,
            expected="a loopback address, or TLS with client certificates",
            hint="give --tls-ca, --tls-cert and --tls-key, or --insecure on a network you trust",
        )


def check_listenable(address: str, who: str) -> None:
    """Raise ClusterError, with the reason, where nobody could listen on `HOST:PORT`.

    gRPC finds that out too, but writes a line of its own to standard error and gives no reason.
    """
    host, port = split_address(address)
    reason: str | None = None
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        places, reason = [], error.strerror
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: connections of an earlier server that are about to end do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            reason = error.strerror
        else:
            return
    raise ClusterError(
        f"{who} cannot listen on this address",
        got=f"{address}: {reason}",
        hint="choose a free port, or 0 for any, and an address of this machine",
    )


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """TLS for a server that asks its clients for certificates."""
    ca, cert, key = tls.read()
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def open_channel(
    address: str,
    tls: TlsFiles | None = None,
    session: bytes = b"",
    *,
    silence: float | None = SILENCE_SECONDS,
) -> grpc.Channel:
    """A channel to a master or worker, lost when it answers no ping for `silence` seconds (None:
    never). Nothing is sent before the first call; with a session, every call shows it.
    """
    split_address(address)
    options = CHANNEL_OPTIONS + ([] if silence is None else silence_options(silence))
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        ca, cert, key = tls.read()
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        channel = grpc.secure_channel(address, credentials, options=options)
    return SessionChannel(channel, session) if session else channel


def connect_master(
    address: str,
    tls: TlsFiles | None,
    token_file: Path | None,
    seconds: float,
    *,
    silence: float | None = SILENCE_SECONDS,
    stop: threading.Event | None = None,
    is_worker: bool = False,
) -> SessionChannel:
    """A channel to a master that has proved to know the token, as this process has to it.

    MasterUnreachableError where nobody can be reached within `seconds`, DeadlineError where one of
    the next answers takes as long, SecurityError where there is no
    token or one side does not know the other's, LimitError where the master has no place for
    another connection (with `is_worker`, of workers and their heartbeat processes). `silence` is
    that of `open_channel`; `stop` ends the wait for a master that cannot be reached.
    """
    channel = SessionChannel(open_channel(address, tls, silence=silence), b"")
    try:
        sign_in(channel, address, tls, token_file, seconds, stop, is_worker)
    except BaseException:
        channel.close()
        raise
    return channel


def sign_in(
    channel: SessionChannel,
    address: str,
    tls: TlsFiles | None,
    token_file: Path | None,
    seconds: float,
    stop: threading.Event | None = None,
    is_worker: bool = False,
) -> None:
    """Give a channel its session, or another one where the master was started again; see
    `connect_master`.
    """
    await_master(channel.plain, address, seconds, tls, stop or threading.Event())
    # A master that was just started has written its token by now.
    credential = find_credential(address, token_file)
    reply = _prove(channel.plain, address, credential, seconds, is_worker)
    channel.session, channel.is_durable = reply.session, reply.is_durable


def _prove(
    channel: grpc.Channel, address: str, credential: Credential, seconds: float, is_worker: bool
) -> pb.ProveReply:
    """The answer with a session, once both sides have proved that they know the secret; each side
    has so many seconds for each of the two answers.
    """
    stub = SignInStub(channel)  # type: ignore[no-untyped-call]  # generated
    nonce, key = secrets.token_bytes(NONCE_BYTES), credential.key
    try:
        answer = stub.Challenge(pb.ChallengeRequest(nonce=nonce, key=key), timeout=seconds)
        expected = credential.proof(b"master", nonce, answer.nonce)
        if not hmac.compare_digest(answer.proof, expected):
            raise SecurityError(
                f"the process that listens at {address} is not the master of this token",
                got="a wrong proof",
                hint="another program may have taken the master's port",
            )
        proof = credential.proof(b"caller", nonce, answer.nonce)
        request = pb.ProveRequest(
            nonce=nonce, key=key, challenge=answer.nonce, proof=proof, is_worker=is_worker
        )
        reply: pb.ProveReply = stub.Prove(request, timeout=seconds)
        return reply
    except grpc.RpcError as error:
        raise call_error(error, address) from error


class SessionChannel(Closing, grpc.Channel):
    """A channel each call of which shows a session."""

    def __init__(self, channel: grpc.Channel, session: bytes) -> None:
        self.session = session
        """That its calls show from now on."""
        self.is_durable = False
        """Whether the jobs of the master outlive it."""
        self.plain = channel
        """The channel without it."""

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel`."""
        return _SessionCall(self.plain.unary_unary(*args, **kwargs), self)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel`."""
        return _SessionCall(self.plain.unary_stream(*args, **kwargs), self)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel`."""
        return _SessionCall(self.plain.stream_unary(*args, **kwargs), self)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel`."""
        return _SessionCall(self.plain.stream_stream(*args, **kwargs), self)

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """See `grpc.Channel`."""
        self.plain.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See `grpc.Channel`."""
        self.plain.unsubscribe(callback)

    def close(self) -> None:
        """See `grpc.Channel`. Where Ctrl-C left a call's lock taken, gRPC would wait for it for
        ever; that call is left to the end of the process.
        """
        with suppress(TimeoutError):
            call_apart(self.plain.close, _CLOSE_SECONDS)


class _SessionCall:
    """A method of a channel, called with the session."""

    def __init__(self, method: Any, channel: SessionChannel) -> None:
        self._method = method
        self._channel = channel

    @property
    def _metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((SESSION_KEY, self._channel.session),)

    def __call__(self, request: Any, timeout: float | None = None) -> Any:
        return self._method(request, timeout=timeout, metadata=self._metadata)

    def future(self, request: Any, timeout: float | None = None) -> Any:
        """As `grpc.UnaryUnaryMultiCallable.future`."""
        return self._method.future(request, timeout=timeout, metadata=self._metadata)


def await_master(
    channel: grpc.Channel,
    address: str,
    seconds: float,
    tls: TlsFiles | None,
    stop: threading.Event,
) -> None:
    """Return when something that speaks gRPC answers; MasterUnreachableError after the deadline.

    SecurityError, at once, where the two sides' TLS does not fit; `tls` is what the channel uses.
    """
    # Not by watching the channel: a thread of gRPC would go on looking at it after it is closed.
    ask = health_pb2_grpc.HealthStub(channel).Check
    files = None if tls is None else (tls.ca, tls.cert, tls.key)
    until, pause = time.monotonic() + seconds, _RECONNECT_SECONDS
    while (left := until - time.monotonic()) > 0 and not stop.is_set():
        try:
            ask(health_pb2.HealthCheckRequest(), timeout=left)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                break
            if code is not grpc.StatusCode.UNAVAILABLE:
                return  # it answers, and says to the next call what is wrong
        else:
            return
        left = until - time.monotonic()
        trouble = tls_trouble(address, files, min(left, _PROBE_SECONDS)) if left > 0 else None
        if trouble is not None:
            raise trouble
        stop.wait(pause)  # calls fail at once until the channel connects again
        pause = min(2 * pause, _LONGEST_RECONNECT_SECONDS)
    raise _unreachable(address, f"no answer within {seconds:g} s")


def _unreachable(address: str, got: str) -> MasterUnreachableError:
    return MasterUnreachableError(
        f"no master can be reached at {address}",
        got=got,
        hint="check the address, and that `plancompiler master` runs there with the same TLS "
        "settings",
    )


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: PlanCompilerError) -> NoReturn:
    """End a call with an error that `call_error` on the other side turns into itself.

    Calls that are refused for security or for a limit are logged.
    """
    level = logging.WARNING if isinstance(error, (SecurityError, LimitError)) else logging.INFO
    peer = context.peer()
    _log.log(level, "refused a call of %s: %s", peer, error, extra={"peer": peer})
    report = encode(pb.ErrorReport, error.report).SerializeToString()
    # Trailers are small; the text goes in the details in any case.
    trailers = ((_REPORT_KEY, report),) if len(report) < 8 << 10 else ()
    await context.abort(_CODES.get(type(error), _OTHERS), str(error)[:4096], trailers)
    raise AssertionError("a call goes on after it was ended")


def call_error(error: grpc.RpcError, address: str) -> PlanCompilerError:
    """What a failed call means: the error of the other side, or what went wrong on the way."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
    metadata: Any = (error.trailing_metadata() if isinstance(error, grpc.Call) else None) or ()
    for key, value in metadata:
        if key == _REPORT_KEY and isinstance(value, bytes):
            try:
                report = decode(ErrorReport, pb.ErrorReport.FromString(value))
            except DecodeError:
                break
            return PlanCompilerError.from_report(report)
    if code is grpc.StatusCode.UNAVAILABLE:
        if "ping timeout" in details or "keepalive" in details:
            return MasterUnreachableError(
                f"the master at {address} answers nothing any longer",
                got=details,
                hint="check whether its process is stopped, or its host is cut off",
            )
        return _unreachable(address, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"the master at {address} did not answer in time", got=details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return LimitError(
            f"a message to or from the master at {address} is larger than it may be",
            got=f"{code.name}: {details}",
            expected=f"at most {MAX_MESSAGE_BYTES} bytes in one message; more goes in chunks",
        )
    return ClusterError(f"a call to the master at {address} failed", got=f"{code.name}: {details}")


def report_of(error: BaseException, doing: str) -> ErrorReport:
    """An error of any kind as a report."""
    if isinstance(error, PlanCompilerError):
        return error.report
    return ClusterError(f"unexpected {type(error).__name__} while {doing}: {error}").report
