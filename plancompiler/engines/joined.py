"""A job whose processes somebody else has started, one for each rank: the first one leads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event

from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.cluster.token import SecretFile, new_credential
from plancompiler.engines.hosted import HostedLauncher
from plancompiler.engines.launch_variables import LAUNCHERS, read_launcher
from plancompiler.engines.launcher import Program, StartedRank
from plancompiler.engines.nodes import Leader, Nodes
from plancompiler.engines.remote_ranks import AgentServer
from plancompiler.errors import UsageError

MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Where the processes meet: an address of the first one's host, and a port that is free there."""


def place_of(
    environment: Mapping[str, str], endpoint: str | None, secret: str | None
) -> Nodes | None:
    """This process's place among those of a job, of which each is a host with one rank; None where
    no launcher has started several. UsageError where its variables contradict each other.
    """
    launched = read_launcher(environment)
    if launched.launcher in (None, LAUNCHERS[0]) or launched.size == 1:
        # What `plancompiler launch` starts are scripts; what one of them starts is its own affair.
        return None
    host, port = (environment.get(name, "") for name in MEETING)
    if endpoint is None and host and port:
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if endpoint is None:
        assert launched.launcher is not None
        raise UsageError(
            f"{launched.launcher.name} has started several processes of this job, and has not set "
            "where they meet",
            got=f"{launched.launcher.rank}={launched.rank}, "
            f"{launched.launcher.size}={launched.size}",
            expected=f"{' and '.join(MEETING)}, or --rdzv-endpoint",
            hint="start one process with --engine, which starts the others; --engine local runs "
            "the job in this process alone",
        )
    if secret is None and not is_loopback(split_address(endpoint)[0]):
        raise UsageError(
            "processes of a job on several hosts need a secret that all of them know",
            got=f"they meet at {endpoint}; neither --token-file nor PLANCOMPILER_WORLD_TOKEN",
            hint="give all of them the same --token-file",
        )
    return Nodes(launched.size, launched.size, endpoint, secret, launched.rank)


class JobLeader(HostedLauncher):
    """The launcher in the first process. It may be started again up to `restarts` times after a
    failure, for which the other processes wait.
    """

    def __init__(
        self,
        place: Nodes,
        say: Callable[[str], None],
        restarts: int,
        on_signal: Callable[[int], None] | None,
    ) -> None:
        """Lines that ranks and agents say go to `say`, and to `on_signal` the signals that mean to
        save and that another process got.
        """
        credential = new_credential()
        secret = place.secret or credential.secret
        super().__init__(
            Leader(1, say),
            lambda _rank, line: say(line),
            say,
            place.endpoint,
            secret=secret,
            on_signal=on_signal,
        )
        self._endpoint = place.endpoint
        self._credential = None if place.secret else credential
        self._file: SecretFile | None = None
        self._starts_left = 1 + restarts

    def start(
        self, program: Program, ranks: int, say: Callable[[str], None], stop: Event
    ) -> Sequence[StartedRank]:
        self._starts_left -= 1
        return super().start(program, ranks, say, stop)

    def _open_server(self) -> AgentServer:
        server = super()._open_server()
        try:
            if self._credential is not None:
                self._file = SecretFile(self._endpoint, self._credential)
        except BaseException:
            server.close()  # nobody else knows it, and its thread would outlive the program
            raise
        return server

    def close(self, error: str | None = None, *, again: bool = False) -> None:
        super().close(error, again=again or (error is not None and self._starts_left > 0))

    def finish(self, error: str | None) -> None:
        """Let the other processes go for good."""
        super().close(error)
        if self._file is not None:
            self._file.remove()
            self._file = None
