"""Files that a job has written on its workers' hosts, fetched through the master."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from plancompiler.cluster.channel import call_error
from plancompiler.cluster.checked import Received
from plancompiler.cluster.file_parts import FileReceiver
from plancompiler.errors import CheckpointError, ClusterError
from plancompiler.executor.checkpoint_index import INDEX
from plancompiler.ir.whole_file import make_writable_folder, naming_output
from plancompiler.proto.cluster_pb2_grpc import ClientStub
from plancompiler.running.watched_job import job_request


def fetch_checkpoint(stub: ClientStub, address: str, job_id: int, folder: Path) -> list[Path]:
    """Bring the checkpoint that a job has written last into a folder of this machine; its files.

    A worker of the job reads it, while the job runs or later. The folder must hold no other
    checkpoint. Raises CheckpointError where it does or where the job's cannot be read,
    SecurityError where its worker does not allow that, ClusterError where there is no such job,
    no worker of it or nothing that it saves.
    """
    if (folder / INDEX).exists():
        raise CheckpointError(
            "the folder holds a checkpoint already", got=str(folder), hint="fetch into another one"
        )
    with naming_output("a checkpoint that was fetched", folder):
        make_writable_folder(folder)
    stream: Any = stub.FetchCheckpoint(job_request(job_id))
    receiver, received = FileReceiver(folder), Received("the master")
    try:
        for message in stream:
            receiver.add(received(message))
        if not receiver.is_complete or [path.name for path in receiver.paths[-1:]] != [INDEX]:
            raise ClusterError("the master went away before the checkpoint had come")
    except BaseException as error:
        receiver.abandon(error)
        for path in receiver.paths:
            path.unlink(missing_ok=True)
        if isinstance(error, grpc.RpcError):
            raise call_error(error, address) from error
        raise
    finally:
        stream.cancel()
    return receiver.paths
