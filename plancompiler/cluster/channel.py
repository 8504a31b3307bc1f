"""How client, master and workers set up gRPC: limits, keepalive, TLS, and errors across calls."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from plancompiler.cluster.serde import report_from_proto, report_to_proto
from plancompiler.errors import (
    ClusterError,
    DeadlineError,
    ErrorReport,
    MasterUnreachableError,
    PlanCompilerError,
    SecurityError,
)
from plancompiler.proto import cluster_pb2 as pb

MAX_MESSAGE_BYTES = 4 << 20
"""Of one gRPC message, either way; anything larger goes in chunks."""
CALL_SECONDS = 30.0
"""Deadline of a call that is not a stream."""
TRANSFER_SERVICE = "plancompiler.proto.Transfer"
FETCH_METHOD = "Fetch"
"""Called without generated code, so that chunks stay serialised."""
_REPORT_KEY = "plancompiler-report-bin"

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_metadata_size", 64 << 10),
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
        found = []
        for path in (self.ca, self.cert, self.key):
            try:
                found.append(path.read_bytes())
            except OSError as error:
                raise SecurityError(
                    "a TLS file cannot be read", got=f"{path}: {error.strerror}"
                ) from error
        return found[0], found[1], found[2]


def software_version() -> str:
    """The version of this installation."""
    return importlib.metadata.version("plancompiler")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; a ClusterError where it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ClusterError("not an address", got=repr(address), expected="HOST:PORT")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def open_channel(address: str, tls: TlsFiles | None = None) -> grpc.Channel:
    """A channel to a master. Nothing is sent before the first call."""
    split_address(address)
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    ca, cert, key = tls.read()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def await_master(channel: grpc.Channel, address: str, seconds: float) -> None:
    """Return when the master can be reached; MasterUnreachableError after the deadline."""
    try:
        grpc.channel_ready_future(channel).result(timeout=seconds)
    except grpc.FutureTimeoutError:
        raise _unreachable(address, f"no answer within {seconds:g} s") from None


def _unreachable(address: str, got: str) -> MasterUnreachableError:
    return MasterUnreachableError(
        f"no master can be reached at {address}",
        got=got,
        hint="check the address, and that `plancompiler master` runs there with the same TLS "
        "settings",
    )


def abort(context: grpc.ServicerContext, error: PlanCompilerError) -> NoReturn:
    """End a call with an error that `call_error` on the other side turns into itself."""
    report = report_to_proto(error.report).SerializeToString()
    if len(report) < 8 << 10:  # trailers are small; the text goes in the details in any case
        context.set_trailing_metadata(((_REPORT_KEY, report),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:4096])


def call_error(error: grpc.RpcError, address: str) -> PlanCompilerError:
    """What a failed call means: the error of the other side, or what went wrong on the way."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
    metadata: Any = (error.trailing_metadata() if isinstance(error, grpc.Call) else None) or ()
    for key, value in metadata:
        if key == _REPORT_KEY and isinstance(value, bytes):
            try:
                report = report_from_proto(pb.ErrorReport.FromString(value))
            except DecodeError:
                break
            return PlanCompilerError.from_report(report)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unreachable(address, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"the master at {address} did not answer in time", got=details)
    return ClusterError(f"a call to the master at {address} failed", got=f"{code.name}: {details}")


def report_of(error: BaseException, doing: str) -> ErrorReport:
    """An error of any kind as a report."""
    if isinstance(error, PlanCompilerError):
        return error.report
    return ClusterError(f"unexpected {type(error).__name__} while {doing}: {error}").report
