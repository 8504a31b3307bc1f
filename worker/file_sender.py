"""Uploads the files of a checkpoint, in a thread beside what the worker does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import grpc

from plancompiler.cluster.channel import report_of
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.codec import encode
from plancompiler.cluster.file_parts import parts_of_file
from plancompiler.cluster.messages import SendFiles
from plancompiler.errors import CheckpointError
from plancompiler.executor.checkpoint_index import INDEX, parse_index
from plancompiler.limits import time_limits
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import WorkerStub
from plancompiler.worker.allowed_paths import AllowedPaths

_log = logging.getLogger(__name__)
_TRIES = 5
"""Looks at a folder whose checkpoint is replaced by a newer one meanwhile."""


class FileSender:
    """One request after the other. `allowed` says which folders may be read; None: all."""

    def __init__(self, stub: WorkerStub, allowed: AllowedPaths | None) -> None:
        self._stub = stub
        self._allowed = allowed
        self.pieces = 0
        """Parts that were sent."""
        self._orders: SimpleQueue[tuple[SendFiles, bytes] | None] = SimpleQueue()
        self._call: Any = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="plancompiler-files", daemon=True)
        self._thread.start()

    def send(self, order: SendFiles, token: bytes) -> None:
        """Queue a request; the token is the worker's."""
        self._orders.put((order, token))

    def reconnected(self, stub: WorkerStub) -> None:
        """The master is reached over another connection."""
        self._stub = stub

    def close(self, seconds: float) -> None:
        """End what is under way."""
        self._is_closed = True
        self._orders.put(None)
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(seconds)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._is_closed:
            try:
                self._call = self._stub.UploadFiles.future(
                    self._uploads(*order), timeout=time_limits.TRANSFER
                )
                self._call.result()
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                _log.warning("files of a checkpoint were not fetched to their end: %s", error)
            finally:
                self._call = None

    def _uploads(self, order: SendFiles, token: bytes) -> Iterator[pb.FileUpload]:
        sent = Sent()
        yield sent(pb.FileUpload(token=token, ticket=order.ticket))
        try:
            with ExitStack() as stack:
                for name, file in self._opened(order.directory, stack):
                    for part in parts_of_file(name, file, os.fstat(file.fileno()).st_size):
                        self.pieces += 1
                        yield sent(pb.FileUpload(part=part))
        except Exception as error:  # whatever it was, the client must hear of it
            report = report_of(error, f"sending the checkpoint in {order.directory}")
            yield sent(pb.FileUpload(error=encode(pb.ErrorReport, report)))

    def _opened(self, directory: str, stack: ExitStack) -> list[tuple[str, BinaryIO]]:
        """The files of the checkpoint in a folder, all of one save, its index last."""
        if self._allowed is not None:
            self._allowed.check_folder(directory, "the checkpoint to fetch")
        folder = Path(directory)
        for left in reversed(range(_TRIES)):
            with ExitStack() as these:
                try:
                    index = these.enter_context((folder / INDEX).open("rb"))
                    names = parse_index(index.read(), str(folder / INDEX)).files
                    index.seek(0)
                    shards = [
                        (name, these.enter_context((folder / name).open("rb"))) for name in names
                    ]
                except OSError as error:
                    # Where a newer checkpoint takes the place of this one, its shards go.
                    if left and isinstance(error, FileNotFoundError):
                        continue
                    raise CheckpointError(
                        "a file of the checkpoint cannot be read",
                        got=f"{error.filename}: {error.strerror}",
                    ) from None
                stack.push(these.pop_all())
                return [*shards, (INDEX, index)]
        raise AssertionError("the last try returns or raises")
