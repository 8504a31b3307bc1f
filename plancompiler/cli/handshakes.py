"""Failed TLS handshakes of a server in our words: gRPC tells of them on standard error only."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from plancompiler.cluster.tls_trouble import refused_handshake
from plancompiler.limits import time_limits

_END_SECONDS = time_limits.HANDSHAKE_END
"""How long the last lines may take at the end."""

# The package lets gRPC note errors only, and these lines are none. gRPC reads this when it is
# imported, which is after this module.
if os.environ.get("GRPC_VERBOSITY") == "ERROR":
    del os.environ["GRPC_VERBOSITY"]


@contextmanager
def explained_handshakes() -> Iterator[None]:
    """Within the block, what goes to standard error passes through a thread, which replaces gRPC's
    lines about handshakes and leaves all others as they are.
    """
    sys.stderr.flush()
    shown = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)

    def pass_on() -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                said = refused_handshake(line.decode(errors="replace").rstrip("\n"))
                # Not by way of standard error, which this thread itself reads.
                os.write(
                    shown, line if said is None else f"refused a connection: {said}\n".encode()
                )

    thread = threading.Thread(target=pass_on, name="plancompiler-handshakes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(shown, 2)
        thread.join(_END_SECONDS)
        if not thread.is_alive():
            os.close(shown)
