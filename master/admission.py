"""Who is let in: every call shows a session of the right role, and streams are counted.

A call that is refused ends before anything of it is read, and the master logs it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc

from plancompiler.cluster.channel import SESSION_KEY, TRANSFER_SERVICE, refuse
from plancompiler.cluster.token import OPERATE, ROLES, SUBMIT, WORKER, Challenger, Credential
from plancompiler.errors import LimitError, PlanCompilerError, SecurityError
from plancompiler.master.connections import Connections, Place
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto import cluster_pb2_grpc as pb_grpc

CLIENT_SERVICE = "plancompiler.proto.Client"
WORKER_SERVICE = "plancompiler.proto.Worker"
SIGN_IN_SERVICE = "plancompiler.proto.SignIn"
HEALTH_SERVICE = "grpc.health.v1.Health"

_OPEN = (SIGN_IN_SERVICE, HEALTH_SERVICE)
"""Anyone may call these: the first is the way to a session, the other tells only that it serves."""
_NEEDS = {
    CLIENT_SERVICE: (SUBMIT, OPERATE),
    WORKER_SERVICE: (WORKER,),
    TRANSFER_SERVICE: (WORKER,),
}
"""By service: one of these roles. Of any other service any role will do."""
_OPERATING = frozenset(f"/{CLIENT_SERVICE}/{name}" for name in ("Status", "Describe", "Cancel"))
"""Methods for which a place of operators is enough."""

_OF_WORKERS = (WORKER_SERVICE, TRANSFER_SERVICE)

_STREAMS_PER_RANK = 4
"""A worker's own stream, its fetches and uploads, one of them perhaps broken."""
_SPARE_STREAMS = 64
"""For those that try to register and cannot."""

Context = grpc.aio.ServicerContext[Any, Any]
CALLER: ContextVar[Credential] = ContextVar("caller")
"""Whose call this is."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many streams may be open at once."""

    total: int = 8192
    """`--max-streams`; those of workers are not among them, but have a limit of their own."""
    peer: int = 1024
    """`--max-streams-per-peer`: of one connection."""


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Wraps every method that the server has."""

    def __init__(
        self, challenger: Challenger, limits: StreamLimits, connections: Connections, ranks: int
    ) -> None:
        self._challenger = challenger
        self._connections = connections
        self._limits = limits
        self._of_workers = 0
        self._max_of_workers = _STREAMS_PER_RANK * ranks + _SPARE_STREAMS
        self._streams: dict[asyncio.Task[Any], Credential] = {}
        """Those that are open, by the task that serves each."""
        self._revoked: set[asyncio.Task[Any]] = set()
        self.refused: Counter[str] = Counter()
        """Calls that ended with an error, by its status code."""
        self._open = 0
        self._of_peer: Counter[str] = Counter()
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method, behind what is asked of its callers."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler: Any = await continuation(handler_call_details)
            if handler is None:  # there is no such method
                return None  # type: ignore[return-value]  # as gRPC does, whose stubs know no None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        streams = handler.request_streaming or handler.response_streaming
        kinds = (
            (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        )
        answer, make = next((inner, make) for inner, make in kinds if inner is not None)

        async def admitted(request: Any, context: Context) -> Any:
            try:
                return await self._admitted(method, streams, answer, request, context)
            except grpc.aio.AbortError:
                self.refused[_code_name(context)] += 1
                raise

        return make(admitted, handler.request_deserializer, handler.response_serializer)

    async def _admitted(
        self, method: str, streams: bool, answer: Any, request: Any, context: Context
    ) -> Any:
        service = method.split("/")[1]
        try:
            caller = self._admit(service, context)
            if caller is not None:
                places = _places(caller, service in _OF_WORKERS, method in _OPERATING)
                await self._connections.admit(context.peer(), places)
            if not streams:
                return await _answer(answer, request, context)
            with self._counted(service, context.peer()), self._ending_with(caller):
                return await _answer(answer, request, context)
        except PlanCompilerError as error:
            await refuse(context, error)

    def _admit(self, service: str, context: Context) -> Credential | None:
        """Whose call it is, None where that may be anyone's; SecurityError where it is nobody's, or
        not allowed.
        """
        if service in _OPEN:
            return None
        metadata: Any = context.invocation_metadata() or ()
        session = next((value for key, value in metadata if key == SESSION_KEY), b"")
        caller = self._challenger.credential_of(session)
        needed = _NEEDS.get(service, ROLES)
        if caller.roles.isdisjoint(needed):
            raise SecurityError(
                f"{caller.name} may not do this: the token lacks a role",
                got=", ".join(sorted(caller.roles)),
                expected=" or ".join(needed),
            )
        CALLER.set(caller)
        return caller

    @contextmanager
    def _ending_with(self, caller: Credential | None) -> Iterator[None]:
        """A stream that ends, with a SecurityError, when its caller's secret does."""
        task = asyncio.current_task()
        if caller is None or task is None:
            yield
            return
        self._streams[task] = caller
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._revoked:
                raise
            task.uncancel()
            raise SecurityError(
                f"the token of {caller.name} has ended: the master's token file has changed",
                got="a stream that was opened with it",
                hint="connect again with a token that the file has now",
            ) from None
        finally:
            del self._streams[task]
            self._revoked.discard(task)

    def end_revoked(self) -> None:
        """End the streams of callers that the master does not know any longer, or as another."""
        for task, caller in self._streams.items():
            if not self._challenger.knows(caller) and task not in self._revoked:
                self._revoked.add(task)
                task.cancel()

    @contextmanager
    def _counted(self, service: str, peer: str) -> Iterator[None]:
        """Hold one of the places of streams; LimitError where there is none."""
        if service in _OF_WORKERS:
            with self._counted_worker():
                yield
            return
        for count, limit, option, whose in (
            (self._of_peer[peer], self._limits.peer, "--max-streams-per-peer", "this connection"),
            (self._open, self._limits.total, "--max-streams", "all clients"),
        ):
            if count >= limit:
                raise LimitError(
                    f"the master has too many open streams of {whose}",
                    got=count + 1,
                    expected=f"at most {limit}",
                    hint=f"close some, or start the master with a larger {option}",
                )
        self._of_peer[peer] += 1
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._of_peer[peer] -= 1
            if not self._of_peer[peer]:
                del self._of_peer[peer]

    @contextmanager
    def _counted_worker(self) -> Iterator[None]:
        """The same for workers, of whom there are as many as ranks."""
        if self._of_workers >= self._max_of_workers:
            raise LimitError(
                "the master has too many open streams of workers",
                got=self._of_workers + 1,
                expected=f"at most {self._max_of_workers}",
                hint="start no more workers than the master has --ranks",
            )
        self._of_workers += 1
        try:
            yield
        finally:
            self._of_workers -= 1


def _places(caller: Credential, is_worker: bool, operates: bool) -> tuple[Place, ...]:
    """Which places of connections are good for what a caller does."""
    if is_worker:
        return (Place.WORKER,)
    return (
        (Place.CLIENT, Place.OPERATOR) if operates and OPERATE in caller.roles else (Place.CLIENT,)
    )


def _code_name(context: Context) -> str:
    """In small letters."""
    code: Any = context.code()  # a number while the call runs
    codes = {each.value[0]: each for each in grpc.StatusCode}
    return codes.get(code, grpc.StatusCode.UNKNOWN).name.lower()


async def _answer(answer: Any, request: Any, context: Context) -> Any:
    """What a method answers, be it a coroutine or a generator."""
    result = answer(request, context)
    if not hasattr(result, "__aiter__"):
        return await result
    async for message in result:
        await context.write(message)
    return None


class SignInService(pb_grpc.SignInServicer):
    """The way to a session."""

    def __init__(self, challenger: Challenger, connections: Connections, is_durable: bool) -> None:
        self._challenger = challenger
        self._connections = connections
        self._is_durable = is_durable

    async def Challenge(  # noqa: N802  # as in cluster.proto
        self, request: pb.ChallengeRequest, context: Context
    ) -> pb.ChallengeReply:
        try:
            nonce, proof = self._challenger.challenge(request.nonce, request.key)
        except PlanCompilerError as error:
            await refuse(context, error)
        return pb.ChallengeReply(nonce=nonce, proof=proof)

    async def Prove(  # noqa: N802  # as in cluster.proto
        self, request: pb.ProveRequest, context: Context
    ) -> pb.ProveReply:
        try:
            session = self._challenger.session(
                request.nonce, request.key, request.challenge, request.proof
            )
            caller = self._challenger.credential_of(session)
            is_worker = request.is_worker and WORKER in caller.roles
            places = _places(caller, is_worker, operates=True)
            await self._connections.admit(context.peer(), places)
        except PlanCompilerError as error:
            await refuse(context, error)
        return pb.ProveReply(session=session, is_durable=self._is_durable)
