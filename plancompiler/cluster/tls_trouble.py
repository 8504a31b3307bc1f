"""Why a TLS connection fails, on either side of it.

gRPC tells a client only that there is no connection, and writes what a server met to standard error
in its own words. So a client that cannot connect tries again with Python's `ssl`, which says why;
and `refused_handshake` reads gRPC's lines.
"""

from __future__ import annotations

import re
import socket
import ssl
from contextlib import suppress
from pathlib import Path

from plancompiler.cluster.address import split_address
from plancompiler.errors import SecurityError

_OPTIONS = "--tls-ca, --tls-cert and --tls-key"
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""What the reason of an `ssl.SSLError` holds where the other side speaks no TLS."""

# --- a client -------------------------------------------------------------------------------------

_HOST_MISMATCHES = (62, 64)
_UNSUITABLE = 26
_OUT_OF_DATE = (9, 10)
"""Codes of OpenSSL's verification: X509_V_ERR_…"""
_FLIGHTS = 4
"""Messages that each side of a handshake sends, at most."""


def tls_trouble(
    address: str, files: tuple[Path, Path, Path] | None, seconds: float
) -> SecurityError | None:
    """The error that explains why no TLS connection to a reachable master is made; None if TLS is
    not the reason.

    `files` are those of the authority, this side's certificate and its key; None for no TLS.
    """
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            connection.settimeout(seconds)
            if files is None:
                return _without_tls(connection, address)
            return _with_tls(connection, host, address, files)
    except OSError:
        return None


def _without_tls(connection: socket.socket, address: str) -> SecurityError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except ssl.SSLError as error:
        if isinstance(error, ssl.SSLEOFError) or any(
            each in (error.reason or "") for each in _NO_TLS
        ):
            return None
    return SecurityError(
        f"the master at {address} asks for TLS, and this side uses none",
        got="no certificate",
        expected="a certificate that the master trusts",
        hint=f"give {_OPTIONS}",
    )


def _with_tls(
    connection: socket.socket, host: str, address: str, files: tuple[Path, Path, Path]
) -> SecurityError | None:
    ca, cert, key = files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(ca)
        context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        return SecurityError(
            "the TLS files of this side cannot be used",
            got=f"{error.strerror or error}",
            expected="PEM files; the certificate and the key of one pair",
            hint=f"check {_OPTIONS}",
        )
    try:
        with context.wrap_socket(connection, server_hostname=host) as secured:
            # What the master thinks of this side's certificate shows after the handshake.
            if secured.recv(1):
                return None
    except ssl.SSLCertVerificationError as error:
        return _bad_certificate(f"the certificate of the master at {address}", error, "serverAuth")
    except ssl.SSLError as error:
        if any(each in (error.reason or "") for each in _NO_TLS):
            return SecurityError(
                f"the master at {address} speaks no TLS, and this side does",
                got=error.reason,
                hint=f"start the master with {_OPTIONS}, or leave them out here",
            )
    except ConnectionError:
        pass
    return _own_certificate(files) or SecurityError(
        f"the master at {address} does not trust this side's certificate",
        got="it ended the connection when it had seen the certificate",
        expected="one signed by the authority that the master's --tls-ca names",
        hint="the master's log says what is wrong with it",
    )


def _own_certificate(files: tuple[Path, Path, Path]) -> SecurityError | None:
    """What a master that trusts the same authority would find wrong with this side's certificate:
    a handshake of this side with itself. gRPC's servers end a connection without saying why.
    """
    ca, cert, key = files
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    server.load_verify_locations(ca)
    server.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(cert, key)
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(one, other),
        server.wrap_bio(other, one, server_side=True),
    )
    try:
        for _ in range(_FLIGHTS):
            for side in sides:
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return _bad_certificate("this side's certificate", error, "clientAuth")
    except ssl.SSLError:
        pass
    return None


def _bad_certificate(whose: str, error: ssl.SSLCertVerificationError, use: str) -> SecurityError:
    what, hint = (
        "is not signed by the authority that --tls-ca names here",
        "have it signed by that one, or give the one that signed it; both sides need the same",
    )
    if error.verify_code in _HOST_MISMATCHES:
        what = "names another host than the one by which it is reached"
        hint = "reach it under a name of its subjectAltName, or have one made with this name"
    elif error.verify_code == _UNSUITABLE:
        what = f"may not be used for {use}"
        hint = f"have one made whose extendedKeyUsage holds {use}, or that has none"
    elif error.verify_code in _OUT_OF_DATE:
        what, hint = "has expired or is not valid yet", "have a new one made; check the clocks"
    return SecurityError(f"{whose} {what}", got=error.verify_message, hint=hint)


# --- a server -------------------------------------------------------------------------------------

_LINE = re.compile(r"^[A-Z]\d{4} .*\] Handshake failed with error (.*)$")
"""What gRPC writes."""
_BROKEN_OFF = (
    "a caller broke off when it had seen this side's certificate: it must be signed by the "
    "authority that the caller's --tls-ca names, name the host by which callers reach this side "
    "(subjectAltName), be one for servers, and not have expired"
)
_SERVER_SIDE = {
    "WRONG_VERSION_NUMBER": f"a caller speaks no TLS: it needs {_OPTIONS}",
    "HTTP_REQUEST": f"a caller speaks no TLS: it needs {_OPTIONS}",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": f"a caller shows no certificate: it needs {_OPTIONS}",
    "unsupported certificate purpose": "a caller's certificate is not one for clients: have one "
    "made whose extendedKeyUsage is clientAuth, or has none",
    "certificate has expired": "a caller's certificate has expired",
    "certificate is not yet valid": "a caller's certificate does not hold yet: check the clocks",
    "CERTIFICATE_VERIFY_FAILED": "a caller's certificate is not signed by the authority that "
    "--tls-ca names",
    "ALERT": _BROKEN_OFF,
    "BAD_PACKET_LENGTH": _BROKEN_OFF,
}
"""By a part of gRPC's line: what it means. The first one counts."""


def refused_handshake(line: str) -> str | None:
    """What a line of gRPC's about a failed handshake means at a server; None for any other line."""
    match = _LINE.match(line)
    if match is None:
        return None
    return next(
        (said for part, said in _SERVER_SIDE.items() if part in match[1]),
        "a TLS handshake with a caller failed",
    )
