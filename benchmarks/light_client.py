"""A client that shares its event loop with a thousand others: what `Client` does for a job, over a
connection of its own, without a thread.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Self

import grpc

from plancompiler.cluster.channel import (
    CHANNEL_OPTIONS,
    SESSION_KEY,
    SILENCE_SECONDS,
    silence_options,
)
from plancompiler.cluster.checked import Received, Sent
from plancompiler.cluster.chunks import to_chunks
from plancompiler.cluster.codec import encode
from plancompiler.cluster.messages import JobPhase, JobRequest, PhaseChanged, StepDone
from plancompiler.cluster.serde import JOB_EVENTS, Reader
from plancompiler.cluster.token import NONCE_BYTES, Credential
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub, SignInStub
from plancompiler.version import VERSION


class LightClient:
    """One connection, signed in."""

    def __init__(self, channel: grpc.aio.Channel, session: bytes) -> None:
        self._channel = channel
        self._stub: Any = ClientStub(channel)  # type: ignore[no-untyped-call]  # generated
        self._metadata = ((SESSION_KEY, session),)

    @classmethod
    async def connect(cls, address: str, credential: Credential) -> Self:
        """Open a connection and prove to know the secret."""
        options = [*CHANNEL_OPTIONS, *silence_options(SILENCE_SECONDS)]
        channel = grpc.aio.insecure_channel(address, options=options)
        stub: Any = SignInStub(channel)  # type: ignore[no-untyped-call]  # generated
        nonce, key = secrets.token_bytes(NONCE_BYTES), credential.key
        answer = await stub.Challenge(pb.ChallengeRequest(nonce=nonce, key=key))
        assert answer.proof == credential.proof(b"master", nonce, answer.nonce)
        proof = credential.proof(b"caller", nonce, answer.nonce)
        reply = await stub.Prove(
            pb.ProveRequest(nonce=nonce, key=key, challenge=answer.nonce, proof=proof)
        )
        return cls(channel, reply.session)

    async def run(self, job: bytes) -> tuple[float, float]:
        """Submit a job of one step and read its events to the end: seconds from the submission to
        the first output, and from the job's turn to it.
        """
        begin = time.perf_counter()
        header = encode(pb.SubmitHeader, JobRequest(1))
        header.version, header.key = VERSION, secrets.token_hex(16)
        sent = Sent()
        messages = [sent(pb.SubmitRequest(header=header))]
        messages += [sent(pb.SubmitRequest(chunk=each)) for each in to_chunks(job, compress=True)]
        reply = await self._stub.Submit(iter(messages), metadata=self._metadata)
        watched = Sent()(pb.JobRequest(job_id=reply.job_id, beside=True))
        received, reader = Received("the master"), Reader(JOB_EVENTS)
        turn = first = phase = None
        async for message in self._stub.Watch(watched, metadata=self._metadata):
            event = reader.read(received(message))
            if isinstance(event, StepDone) and first is None:
                first = time.perf_counter()
            elif isinstance(event, PhaseChanged):
                phase = event.phase
                if phase is JobPhase.COMPILING:
                    turn = time.perf_counter()
        assert phase is JobPhase.FINISHED
        assert turn is not None
        assert first is not None
        return first - begin, first - turn

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close(None)
