"""Who may call a master: secrets in files, and the proofs by which both sides know each other.

A token file holds one or several lines. A line is a secret alone, whose holder may do everything,
or `NAME ROLES SECRET` with roles separated by commas. Empty lines and lines that begin with `#` are
passed over. The secret itself never crosses the wire: each side proves that it knows it, by an HMAC
over nonces of both.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.errors import SecurityError
from plancompiler.ir.whole_file import whole_file
from plancompiler.limits import time_limits

SUBMIT, OPERATE, WORKER = "submit", "operate", "worker"
ROLES = (SUBMIT, OPERATE, WORKER)
"""Submit jobs and follow one's own; do so with everybody's; serve as a rank."""
RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
NONCE_BYTES = 16
_FOLDER = "plancompiler"
_DEFAULT_NAME = "user"
_MIN_CHARACTERS = 16
_MAX_BYTES = 1 << 20
"""Of a token file."""
_CHALLENGE_SECONDS = time_limits.CHALLENGE
"""How long a challenge may be answered."""
_TRIES = 10
_STAMP = struct.Struct("<d")
_MADE_BY = "python -c 'import secrets; print(secrets.token_hex(32))' > FILE; chmod 600 FILE"


@dataclass(frozen=True, slots=True)
class Credential:
    """A secret, who holds it, and what its holder may do."""

    name: str
    roles: frozenset[str]
    secret: str = field(repr=False)

    @property
    def key(self) -> bytes:
        """Names the secret to those who know it."""
        return hashlib.sha256(b"key:" + self.secret.encode()).digest()[:16]

    def proof(self, side: bytes, *nonces: bytes) -> bytes:
        """Shows that its maker knows the secret; `side` is who makes it."""
        return hmac.digest(self.secret.encode(), b"\0".join((side, *nonces)), "sha256")


def new_credential() -> Credential:
    """A fresh secret whose holder may do everything."""
    return Credential(_DEFAULT_NAME, frozenset(ROLES), secrets.token_hex(32))


# --- files ----------------------------------------------------------------------------------------


def parse_tokens(text: str, where: object) -> tuple[Credential, ...]:
    """The lines of a token file. SecurityErrors name the line, and never show a secret."""
    credentials: dict[str, Credential] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"{where}, line {number}"
        if len(words) == 1:
            name, roles, secret = _DEFAULT_NAME, frozenset(ROLES), words[0]
        elif len(words) == 3:
            name, roles, secret = words[0], frozenset(words[1].split(",")), words[2]
        else:
            raise SecurityError(
                "a line of a token file does not parse",
                got=f"{place}: {len(words)} words",
                expected="a secret, or a name, roles separated by commas, and a secret",
            )
        unknown = sorted(roles - set(ROLES))
        if unknown:
            raise SecurityError(
                "a token file names a role that there is not",
                got=f"{place}: {', '.join(map(repr, unknown))}",
                expected=", ".join(ROLES),
            )
        if len(secret) < _MIN_CHARACTERS or not secret.isascii() or not secret.isprintable():
            raise SecurityError(
                "a secret of a token file could be guessed",
                got=f"{place}: {len(secret)} characters",
                expected=f"at least {_MIN_CHARACTERS} random ASCII characters",
                hint=f"make one with {_MADE_BY}",
            )
        if secret in credentials:
            raise SecurityError("a token file has a secret twice", got=place)
        credentials[secret] = Credential(name, roles, secret)
    if not credentials:
        raise SecurityError(
            "a token file holds no secret", got=str(where), hint=f"make one with {_MADE_BY}"
        )
    return tuple(credentials.values())


def read_token_file(path: Path) -> tuple[Credential, ...]:
    """What a file that the user named holds.

    SecurityError where it cannot be read, or where others could read or write it.
    """
    return _read(path, os.O_RDONLY, 0o027, (os.getuid(), 0))


def _read(path: Path, flags: int, forbidden: int, owners: Sequence[int]) -> tuple[Credential, ...]:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            data = file.read(_MAX_BYTES + 1) if stat.S_ISREG(about.st_mode) else b""
    except OSError as error:
        raise SecurityError(
            "a token file cannot be read",
            got=f"{path}: {error.strerror}",
            hint=f"a new secret is made with {_MADE_BY}",
        ) from None
    mode = stat.S_IMODE(about.st_mode)
    if not stat.S_ISREG(about.st_mode) or len(data) > _MAX_BYTES:
        raise SecurityError("a token file is no file of text", got=str(path))
    if mode & forbidden or about.st_uid not in owners:
        raise SecurityError(
            "others could read or change a token file",
            got=f"{path}: mode {mode:03o}, user {about.st_uid}",
            expected=f"mode 600, user {os.getuid()}",
            hint=f"chmod 600 {path}",
        )
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise SecurityError("a token file is no file of text", got=str(path)) from None
    return parse_tokens(text, path)


def _own_folder() -> Path:
    """Where this user's masters leave their tokens."""
    given = os.environ.get(RUNTIME_VARIABLE, "")
    with suppress(OSError):
        if given and Path(given).stat().st_uid == os.getuid():
            return Path(given) / _FOLDER
    return Path(tempfile.gettempdir()) / f"{_FOLDER}-{os.getuid()}"


def _folders() -> list[Path]:
    """Where to look for them: a master may have been started with another environment."""
    uid = os.getuid()
    login = Path(f"/run/user/{uid}") / _FOLDER
    temporary = Path(tempfile.gettempdir()) / f"{_FOLDER}-{uid}"
    return list(dict.fromkeys((_own_folder(), login, temporary)))


def _check_folder(folder: Path) -> None:
    """SecurityError where anyone but this user could put files into a folder; OSError where there
    is none.
    """
    about = folder.lstat()
    private = stat.S_ISDIR(about.st_mode) and not stat.S_IMODE(about.st_mode) & 0o077
    if not private or about.st_uid != os.getuid():
        raise SecurityError(
            "a folder of tokens is not this user's alone",
            got=f"{folder}: mode {stat.S_IMODE(about.st_mode):03o}, user {about.st_uid}"
            + (", a symbolic link" if stat.S_ISLNK(about.st_mode) else ""),
            expected=f"a folder of mode 700, user {os.getuid()}",
            hint=f"remove it, or set {RUNTIME_VARIABLE} to a folder of your own",
        )


def _file_name(host: str, port: int) -> str:
    return f"{host}-{port}.token"


class SecretFile:
    """The secret of a running master, where clients and workers of its user find it.

    The file is locked as long as its master lives: a file without a lock is one that a killed
    master left behind, which the next master of the same user removes.
    """

    def __init__(self, address: str, credential: Credential) -> None:
        """Write it. SecurityError where there is no folder that only this user can write."""
        folder = _own_folder()
        self._path = folder / _file_name(*split_address(address))
        self._text = f"{credential.secret}\n"
        self._lock = -1
        try:
            # A master that ends at this moment may take the empty folder with it.
            for left in reversed(range(_TRIES)):
                try:
                    self._write(folder)
                    break
                except FileNotFoundError:
                    if not left:
                        raise
        except OSError as error:
            raise SecurityError(
                "the master's token cannot be written where clients and workers would find it",
                got=f"{folder}: {error.strerror}",
                hint="give master, workers and clients the same --token-file",
            ) from None
        _remove_unlocked(folder)

    def _write(self, folder: Path) -> None:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_folder(folder)
        with whole_file(self._path, mode=0o600) as file:
            file.write(self._text.encode())
            self._unlock()
            self._lock = os.dup(file.fileno())
            with suppress(OSError):  # a file system without locks: others cannot take it either
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Unless another master has taken its place; also the folder, where it is the last one."""
        with suppress(OSError):
            if self._path.read_text() == self._text:
                self._path.unlink()
            self._path.parent.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_unlocked(folder: Path) -> None:
    """Remove the files whose masters have ended without doing so."""
    for path in folder.glob("*.token"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another master may have put its own file in place of this one meanwhile.
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                path.unlink()


def find_credential(address: str, token_file: Path | None = None) -> Credential:
    """What a client or worker shows the master at an address: the first line of the file that the
    user named, else what a master of the same user has left.

    SecurityError where there is none, or where it cannot be trusted.
    """
    credential = left_credential(address) if token_file is None else read_token_file(token_file)[0]
    if credential is None:
        raise SecurityError(
            f"no token of a master at {address} was found",
            got=f"no file for it in {', '.join(map(str, _folders()))}",
            expected="a master of the same user on this machine, or --token-file",
            hint="copy the master's --token-file here and give it as --token-file "
            "(token_file= in Python)",
        )
    return credential


def left_credential(address: str) -> Credential | None:
    """What a master of the same user has left for the address; None where none has. SecurityError
    where it cannot be trusted.
    """
    host, port = split_address(address)
    for folder in _folders():
        try:
            _check_folder(folder)
        except OSError:
            continue
        for name in _names_of(host):
            path = folder / _file_name(name, port)
            if path.exists() or path.is_symlink():
                return _read(path, os.O_RDONLY | os.O_NOFOLLOW, 0o077, (os.getuid(),))[0]
    return None


def _names_of(host: str) -> Iterator[str]:
    """How a master may have written the host by which a client calls it."""
    yield host
    if is_loopback(host):
        yield from (each for each in ("127.0.0.1", "localhost", "::1") if each != host)
    yield from ("0.0.0.0", "::")


# --- proofs ---------------------------------------------------------------------------------------


class Challenger:
    """The master's side of signing in. It keeps nothing of its callers: what it hands out is signed
    with a key of its own, so that nobody can fill its memory.
    """

    def __init__(self, credentials: Sequence[Credential]) -> None:
        self._credentials = {each.key: each for each in credentials}
        self._key = secrets.token_bytes(32)

    def challenge(self, nonce: bytes, key: bytes) -> tuple[bytes, bytes]:
        """The master's nonce, and the proof that it knows the secret with this key."""
        credential = self._credential(key)
        if len(nonce) != NONCE_BYTES:
            raise SecurityError("a nonce has a wrong size", got=len(nonce), expected=NONCE_BYTES)
        stamp = _STAMP.pack(time.monotonic()) + secrets.token_bytes(NONCE_BYTES)
        challenge = stamp + self._sign(b"challenge", stamp)
        return challenge, credential.proof(b"master", nonce, challenge)

    def session(self, nonce: bytes, key: bytes, challenge: bytes, proof: bytes) -> bytes:
        """What a caller that has proved to know its secret shows with its other calls."""
        credential = self._credential(key)
        stamp, signature = challenge[:-32], challenge[-32:]
        fresh = (
            hmac.compare_digest(signature, self._sign(b"challenge", stamp))
            and time.monotonic() - _STAMP.unpack_from(stamp)[0] < _CHALLENGE_SECONDS
        )
        expected = credential.proof(b"caller", nonce, challenge)
        if not fresh or not hmac.compare_digest(proof, expected):
            raise _unknown()
        body = key + secrets.token_bytes(NONCE_BYTES)
        return body + self._sign(b"session", body)

    def credential_of(self, session: bytes) -> Credential:
        """Whose session this is; SecurityError where it is nobody's."""
        body, signature = session[:-32], session[-32:]
        if not hmac.compare_digest(signature, self._sign(b"session", body)):
            raise SecurityError(
                "this call shows no session of this master",
                got="none" if not session else "one that it did not give, or before it was started",
                hint="clients and workers of plancompiler sign in by themselves; connect again",
            )
        return self._credential(body[:NONCE_BYTES])

    def replace(self, credentials: Sequence[Credential]) -> None:
        """From now on these are known, and no others."""
        self._credentials = {each.key: each for each in credentials}

    def knows(self, credential: Credential) -> bool:
        """Whether a secret still is its holder's, with the same roles."""
        return self._credentials.get(credential.key) == credential

    def holder_of(self, secret: str) -> Credential:
        """Whose secret this is; SecurityError where it is nobody's."""
        return self._credential(Credential("", frozenset(), secret).key)

    def _credential(self, key: bytes) -> Credential:
        credential = self._credentials.get(key)
        if credential is None:
            raise _unknown()
        return credential

    def _sign(self, what: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, what + b":" + text, "sha256")


def _unknown() -> SecurityError:
    return SecurityError(
        "the master does not know this token",
        hint="give --token-file with a line of the file that the master was started with; without "
        "it, a master and its workers and clients must run as one user on one machine",
    )
