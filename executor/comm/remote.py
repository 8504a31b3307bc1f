"""Link between hosts: a gRPC stream from each rank to each other, and receive buffers at its end.

A process has one `PeerServer`, at which ranks of other hosts reach it, for all its runs. Each run
of a rank has a `MessageLink` over a `StreamCarrier`, which the server finds by the run's name
in the first frame of a stream; the frame proves that its sender knows the run's token.
"""

from __future__ import annotations

import hmac
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import grpc

from plancompiler.errors import PlanCompilerError, SecurityError, TransportError
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.host_wire import ABORT
from plancompiler.executor.comm.messages import Frame, MessageLink, Receiver
from plancompiler.executor.threads import await_threads, settle
from plancompiler.limits import time_limits

SERVICE = "plancompiler.Peers"
_KEY = "plancompiler-peer-bin"
_CANCEL_AGAIN = 1.0
"""Seconds after which the calls of a server that is stopped are cancelled once more."""
_LAST_WORDS = "plancompiler-last-words-bin"
"""The metadata in which a rank says its last frame to who sends to it, as well as over its own
stream: that one may be cut."""
METHOD = "Exchange"
"""Takes a stream of frames (see `remote_wire`) and answers with nothing after the last one."""
MAX_STREAMS = 1024
"""Streams that a server takes at once: one for each remote peer of each of its ranks."""
HELLO_SECONDS = time_limits.HELLO
"""How long a stream may be open without a greeting."""
RUN_SECONDS = time_limits.RUN_AHEAD
"""How long a peer may be ahead of this process with a run."""

_log = logging.getLogger(__name__)

_TLS_OPTIONS = "--tls-ca, --tls-cert and --tls-key"
_REACH_SECONDS = time_limits.REACH
"""How long it may take to find out whether a peer can be reached."""
_PROBE_SECONDS = time_limits.PROBE
"""The same for a peer that has come, and so has something to answer with."""
_UNREACHED_SECONDS = time_limits.UNREACHED
"""How long tries to connect to a peer that listens may fail."""
_UNHEARD_SECONDS = time_limits.UNHEARD
"""How long a peer that has come and answers may not have heard of this rank."""
_UNHEARD_END = "it ended its run, and what it sent last was lost on the way"
_CLOSURES = 2
"""Connections that a peer closes at once before it counts as refusing them."""
_POLL_SECONDS = 0.5
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 2 * wire.CHUNK_BYTES),
    ("grpc.max_send_message_length", 2 * wire.CHUNK_BYTES),
    # A rank that answers no ping for ten seconds is lost: stopped, or cut off. gRPC answers in
    # threads of its own, whatever holds the interpreter. A ping goes out up to two intervals after
    # the last byte, and two layers wait for its answer one after the other.
    ("grpc.keepalive_time_ms", 1_500),
    ("grpc.keepalive_timeout_ms", 3_500),
    ("grpc.http2.ping_timeout_ms", 3_500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 700),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.so_reuseport", 0),
]


class _RankOfRun(NamedTuple):
    """A rank that takes streams."""

    token: str
    """The run's."""
    receiver: Receiver
    streams: set[grpc.ServicerContext]
    """Those that are open."""


class PeerServer:
    """Where ranks of other hosts reach the ranks of this process.

    `listen` is HOST:PORT, port 0 for any free one. Raises TransportError where it cannot listen.
    `key` is what the processes that may call have in common; without one anybody may
    open a stream, and must then prove to know the token of the run.
    """

    def __init__(
        self,
        listen: str,
        credentials: grpc.ServerCredentials | None = None,
        key: bytes = b"",
    ) -> None:
        self.key = key
        self._runs: dict[tuple[bytes, int], _RankOfRun] = {}
        """By the run's name and the rank."""
        self._changed = threading.Condition()
        self._closed = False
        self._threads = _StreamThreads()
        self._server = grpc.server(
            self._threads, options=_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS
        )
        handler = grpc.stream_unary_rpc_method_handler(self._exchange)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(listen)
            else:
                self.port = self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise TransportError(
                "other ranks cannot be listened to at this address", got=listen
            ) from error
        self._server.start()

    def attach(self, token: str, receiver: Receiver) -> None:
        """Take streams of a run for a rank."""
        key = wire.run_name(token), receiver.rank
        with self._changed:
            if key in self._runs:
                raise TransportError("a rank was started twice", rank=receiver.rank)
            self._runs[key] = _RankOfRun(token, receiver, set())
            self._changed.notify_all()

    def answer(self, token: str, receiver: Receiver, last: Frame) -> None:
        """Say a rank's last frame to those whose streams to it are open; they hear it when these
        end.
        """
        with self._changed:
            run = self._runs.get((wire.run_name(token), receiver.rank))
            streams = tuple(run.streams) if run is not None else ()
        for context in streams:
            with suppress(grpc.RpcError, ValueError):  # it has just ended
                context.send_initial_metadata(((_LAST_WORDS, last.encoded()),))

    def detach(self, token: str, receiver: Receiver) -> None:
        """Take no more streams of a run; those that are open go on to their end."""
        with self._changed:
            self._runs.pop((wire.run_name(token), receiver.rank), None)

    def close(self, grace: float | None = None) -> None:
        """End all streams, after `grace` seconds if they do not end before, and stop listening.

        Safe to call again.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Without a grace period gRPC waits for its calls for ever, with one of 0 in another thread.
        # A call that begins while all are cancelled is none of them, so they are cancelled again.
        if not self._server.stop(grace or 0.0).wait((grace or 0.0) + _CANCEL_AGAIN):
            self._server.stop(0.0).wait(time_limits.THREAD_END)
        await_threads(self._threads.running)

    def credentials(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata by which a call shows a server of the same key that its caller knows it."""
        return ((_KEY, hmac.digest(self.key, b"peer", "sha256")),) if self.key else ()

    def _is_peer(self, context: grpc.ServicerContext) -> bool:
        """Whether a call shows what `credentials` are."""
        if not self.key:
            return True
        (_, expected), *_ = self.credentials()
        shown = next((value for name, value in context.invocation_metadata() if name == _KEY), b"")
        return isinstance(shown, bytes) and hmac.compare_digest(shown, expected)

    def _exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        # Before anything is waited for: strangers must not hold the threads that peers need.
        if not self._is_peer(context):
            _log.warning("refused a stream of %s: it does not know this cluster", context.peer())
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "a process that does not know this cluster called"
            )
        try:
            rank, run = self._greet(frames, context)
        except PlanCompilerError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, error.report.what)
        except Exception:  # the stream ended; grpc has no narrower class for it
            return b""
        reason, receiver = "its stream ended", run.receiver
        with self._changed:
            run.streams.add(context)
        try:
            for place, frame in enumerate(frames, start=1):  # the greeting was frame 0
                if not receiver.receive(rank, wire.without_check(frame, place)):
                    return b""
        except grpc.RpcError:
            reason = "its stream broke"
        except PlanCompilerError as error:
            reason = error.report.what
        except Exception as error:  # as above, or a fault here: either way the peer is lost
            reason = str(error) or type(error).__name__
        finally:
            with self._changed:
                run.streams.discard(context)
        receiver.lost(rank, reason)
        return b""

    def _greet(
        self, frames: Iterator[bytes], context: grpc.ServicerContext
    ) -> tuple[int, _RankOfRun]:
        # A stream that does not introduce itself must not keep a thread.
        timer = threading.Timer(HELLO_SECONDS, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            hello = wire.unpack_hello(next(frames, b""))
        finally:
            timer.cancel()
            timer.join()
        key = hello.run, hello.receiver
        end = time.monotonic() + RUN_SECONDS
        with self._changed:
            while key not in self._runs:
                if self._closed or not context.is_active() or time.monotonic() > end:
                    raise TransportError("this process knows nothing of the run")
                self._changed.wait(_POLL_SECONDS)
            run = self._runs[key]
        if not wire.is_of_run(hello, run.token):
            raise TransportError("a process that is not part of the run greeted this rank")
        return hello.sender, run


class _StreamThreads(ThreadPoolExecutor):
    """A thread for each stream, for which the interpreter does not wait at its end: it would before
    it says that the main thread has ended, and only then eager programs close their streams.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.running: tuple[threading.Thread, ...] = ()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in a new thread."""
        future: Future[Any] = Future()
        call = partial(function, *args, **kwargs)
        thread = threading.Thread(
            target=settle, args=(future, call), name="plancompiler-peer", daemon=True
        )
        thread.start()
        self.running = (*(each for each in self.running if each.is_alive()), thread)
        return future


class _Line:
    """What goes to one peer."""

    def __init__(self, first: bytes) -> None:
        self.call: Any = None
        self.channel: grpc.Channel | None = None
        self.trouble = ""
        """What the last try to reach the peer met."""
        self.sender: threading.Thread | None = None
        """The thread of gRPC's that asks for the frames."""
        self.ender: threading.Thread | None = None
        """The one that tells why the call has failed."""
        self.closures = 0
        """How often the peer has closed the connection at once."""
        self._state: grpc.ChannelConnectivity | None = None
        self._has_state = threading.Event()
        self._apart = 0.0
        self._unheard = 0.0
        self._looked = self._answered = 0.0
        self._first = first
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._last: Frame | None = None

    def put(self, frame: Frame) -> None:
        self._frames.put(frame)

    def look(self, channel: grpc.Channel) -> float:
        """For how many seconds there has been no connection, as far as looks have seen. Of the time
        between two of them, in which this process may have stood still, only some counts.
        """
        now, is_first = time.monotonic(), not self._looked
        passed = 0.0 if is_first else min(now - self._looked, _REACH_SECONDS)
        self._looked = now
        if is_first:
            channel.subscribe(self._note)
            self._has_state.wait(_POLL_SECONDS)
        is_connected = self._state is grpc.ChannelConnectivity.READY
        self._apart = 0.0 if is_connected else self._apart + passed
        return self._apart

    def answers(self) -> float:
        """The peer answers and still has not heard of this rank: for how many seconds that has been
        so. Of the time between two answers only some counts, as in `look`.
        """
        now = time.monotonic()
        if self._answered:
            self._unheard += min(now - self._answered, _REACH_SECONDS)
        self._answered = now
        return self._unheard

    @property
    def is_connecting(self) -> bool:
        """Whether the first try to connect has yet to meet an answer or a refusal."""
        return self._state is grpc.ChannelConnectivity.CONNECTING

    def _note(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        self._has_state.set()
        # gRPC's thread that watches prints a traceback if it meets a channel that is just closed.
        if state is grpc.ChannelConnectivity.READY and self.channel is not None:
            self.channel.unsubscribe(self._note)

    def finish(self, last: Frame, hurry: bool) -> None:
        """The frame after which there is none; with `hurry`, the next one."""
        if hurry:
            self._last = last
        else:
            self._frames.put(last)
        self._frames.put(None)

    def frames(self) -> Iterator[bytes]:
        """All frames as bytes, made when the stream has room for them."""
        self.sender = threading.current_thread()
        yield self._first
        place = 1
        while (frame := self._frames.get()) is not None and self._last is None:
            yield wire.with_check(frame.parts(), place)
            place += 1
        if self._last is not None:
            yield wire.with_check(self._last.parts(), place)


class StreamCarrier:
    """Frames of one run over gRPC. `addresses` are those of other ranks' servers, by rank."""

    def __init__(
        self,
        token: str,
        server: PeerServer,
        addresses: Mapping[int, str],
        open_channel: Callable[[str], grpc.Channel],
        with_tls: bool = False,
    ) -> None:
        self._with_tls = with_tls
        self._token = token
        self._server = server
        self._addresses = dict(addresses)
        self._open_channel = open_channel
        self._receiver: Receiver | None = None
        self._lines: dict[int, _Line] = {}
        self._closing = False

    def open(self, peers: Sequence[int], receiver: Receiver) -> None:
        """See `Carrier.open`."""
        unknown = [peer for peer in peers if peer not in self._addresses]
        if unknown:
            raise TransportError(
                "the address of a peer is not known", rank=receiver.rank, got=f"ranks {unknown}"
            )
        self._receiver = receiver
        # The receiver may answer as soon as it is attached.
        self._lines = {
            peer: _Line(wire.pack_hello(self._token, receiver.rank, peer)) for peer in peers
        }
        self._server.attach(self._token, receiver)
        for peer, line in tuple(self._lines.items()):
            line.channel = self._open_channel(self._addresses[peer])
            method = line.channel.stream_unary(f"/{SERVICE}/{METHOD}", None, None)
            line.call = method.future(
                line.frames(), wait_for_ready=True, metadata=self._server.credentials()
            )
            line.call.add_done_callback(partial(self._ended, peer, line))

    def _ended(self, peer: int, line: _Line, call: Any) -> None:
        if self._closing or self._receiver is None or call.code() is grpc.StatusCode.OK:
            return
        # Metadata of a call that has failed may be yet to come, by the thread that is in here.
        ender = threading.Thread(
            target=self._lost,
            args=(peer, call, self._receiver),
            name="plancompiler-lost-peer",
            daemon=True,
        )
        ender.start()
        line.ender = ender

    def _lost(self, peer: int, call: Any, receiver: Receiver) -> None:
        last = dict(call.initial_metadata() or ()).get(_LAST_WORDS, b"")
        if last[:1] == bytes([ABORT]):
            receiver.receive(peer, last)
            return
        details = _UNHEARD_END if last else call.details() or call.code().name
        receiver.lost(peer, f"at {self.where(peer)}: {details}")

    def send(self, rank: int, frame: Frame) -> None:
        """See `Carrier.send`."""
        line = self._lines.get(rank)
        if line is not None:
            line.put(frame)

    def close(self, last: Frame, hurry: bool, seconds: float) -> None:
        """See `Carrier.close`."""
        self._closing = True
        if self._receiver is not None:
            self._server.answer(self._token, self._receiver, last)
        for line in self._lines.values():
            line.finish(last, hurry)
        end = time.monotonic() + seconds
        for line in self._lines.values():
            if line.call is not None:
                # Who could not be reached before is not waited for now.
                _await_end(line.call, 0.0 if line.trouble else end - time.monotonic())
            if line.channel is not None:
                line.channel.close()
        threads = (thread for line in self._lines.values() for thread in (line.sender, line.ender))
        await_threads(thread for thread in threads if thread is not None)
        if self._receiver is not None:
            self._server.detach(self._token, self._receiver)
        self._lines.clear()

    def connect_error(self, rank: int, is_known: bool) -> PlanCompilerError | None:
        """See `Carrier.connect_error`. Stream calls wait for the connection and do not say what it
        lacks, so a call that does not wait is made."""
        line = self._lines.get(rank)
        if line is None or line.channel is None:
            return None
        apart = line.look(line.channel)
        if apart >= _UNREACHED_SECONDS:
            return TransportError(
                f"rank {rank} cannot be reached",
                rank=rank,
                got=f"no connection to {self.where(rank)} within {apart:.0f} s",
                expected="an answer from the address at which it listens",
                hint="look at what lies between the hosts of both ranks, such as a firewall or a "
                "proxy, and whether the --listen of its worker is an address that others reach",
            )
        if line.is_connecting:  # a call would only wait for that
            return None
        code = self._reach(line.channel, line, _PROBE_SECONDS if is_known else _REACH_SECONDS)
        if code is grpc.StatusCode.UNAVAILABLE:
            line.closures += "Socket closed" in line.trouble
            return self._not_trusted(rank, line)
        # A peer that has come has all that it takes to have heard of this rank.
        if is_known and (code is grpc.StatusCode.PERMISSION_DENIED or self._answers_anew(rank)):
            seconds = line.answers()
            if seconds >= _UNHEARD_SECONDS:
                return TransportError(
                    f"what this rank sends does not reach rank {rank}",
                    rank=rank,
                    got=f"it has come, and not heard of this rank for {seconds:.0f} s",
                    expected=f"a greeting that arrives at {self._addresses[rank]}",
                    hint="something between their hosts loses or changes what they send",
                )
        return None

    def _reach(self, channel: grpc.Channel, line: _Line, seconds: float) -> grpc.StatusCode:
        """What a peer says to a call that does not greet."""
        reach = channel.stream_unary(f"/{SERVICE}/{METHOD}", None, None)
        try:
            reach(iter(()), timeout=seconds, metadata=self._server.credentials())
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            line.trouble = (error.details() if isinstance(error, grpc.Call) else None) or code.name
            if code is grpc.StatusCode.PERMISSION_DENIED:
                line.trouble = ""  # it answers, and will come when it is ready
            return code
        return grpc.StatusCode.OK

    def _answers_anew(self, rank: int) -> bool:
        """Whether a peer answers over another connection than the one of its line."""
        channel = self._open_channel(self._addresses[rank])
        try:
            code = self._reach(channel, _Line(b""), _PROBE_SECONDS)
        finally:
            channel.close()
        return code is grpc.StatusCode.PERMISSION_DENIED

    def _not_trusted(self, rank: int, line: _Line) -> SecurityError | None:
        hint = self._hint(rank, line)
        if not hint:
            return None
        return SecurityError(
            f"rank {rank} at {self._addresses[rank]} and this rank do not trust each other",
            rank=rank,
            got=line.trouble,
            expected="certificates that both sides accept, or no TLS on either side",
            hint=hint,
        )

    def _hint(self, rank: int, line: _Line) -> str:
        """What to do about a peer that can be reached but not talked to; empty for any other."""
        trouble = line.trouble
        if "WRONG_VERSION_NUMBER" in trouble:
            return f"rank {rank} speaks no TLS: give {_TLS_OPTIONS} to its worker too"
        if "CERTIFICATE_VERIFY_FAILED" in trouble:
            return (
                f"have the certificate of rank {rank} signed by the authority that this rank's "
                "--tls-ca names"
            )
        if "Verification" in trouble:
            return (
                f"the certificate of rank {rank} must name the host under which others reach it: "
                "make one with that subjectAltName, or --listen under a name that it has"
            )
        if "handshake failed" in trouble:
            return "compare the TLS settings of both workers"
        if line.closures < _CLOSURES:
            return ""
        if self._with_tls:
            return (
                f"rank {rank} hangs up on this rank's certificate: have it signed by the authority "
                "that its --tls-ca names"
            )
        return f"rank {rank} asks for TLS: give {_TLS_OPTIONS} to this rank's worker too"

    def where(self, rank: int) -> str:
        """See `Carrier.where`."""
        line = self._lines.get(rank)
        trouble = f" ({line.trouble})" if line is not None and line.trouble else ""
        return f"{self._addresses[rank]}{trouble}"


def _await_end(call: Any, seconds: float) -> None:
    """Give a call the chance to end well."""
    try:
        call.result(timeout=max(seconds, 0.0))
    except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
        call.cancel()


def channel_options() -> list[tuple[str, int]]:
    """Options of a channel to a `PeerServer`."""
    return list(_OPTIONS)


def plain_channel(address: str) -> grpc.Channel:
    """A channel without TLS."""
    return grpc.insecure_channel(address, options=_OPTIONS)


def remote_link(
    token: str,
    rank: int,
    server: PeerServer,
    addresses: Mapping[int, str],
    open_channel: Callable[[str], grpc.Channel] = plain_channel,
    with_tls: bool = False,
    closing: Callable[[float], object] | None = None,
    linger: float = 0.0,
) -> MessageLink:
    """The link of a rank to ranks none of which shares memory with it.

    `token` is the run's secret; `addresses` are those of the peers' servers, by rank; `with_tls` is
    what `open_channel` does; `closing` and `linger` are those of `MessageLink`.
    """
    carrier = StreamCarrier(token, server, addresses, open_channel, with_tls)
    return MessageLink(rank, carrier, closing, linger)
