"""The engine `ray`: an actor per rank, in a placement group, keeps the rank's agent."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plancompiler.engines.agent_host import run_agent
from plancompiler.engines.hosted import Engine, working_folder
from plancompiler.errors import EngineError, UsageError

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class AgentActor:
    """What Ray places and watches."""

    def run(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> str:
        """See `run_agent`."""
        return run_agent(command, variables, folder)


class Ray(Engine):
    """The cluster that `RAY_ADDRESS` names, the one of this host, or else one made for the run."""

    name = "ray"

    def __init__(self, words: Sequence[str], _say: Callable[[str], None]) -> None:
        """`words` is at most one of Ray's strategies for placement groups."""
        if len(words) > 1 or any(each not in _STRATEGIES for each in words):
            raise UsageError(
                "the engine ray takes a strategy for its placement group",
                got=" ".join(words),
                expected=" or ".join(_STRATEGIES),
            )
        self._strategy = words[0] if words else "PACK"
        self._ray = _module("ray")
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def start(
        self, ranks: int, command: Sequence[str], variables: Sequence[Mapping[str, str]]
    ) -> None:
        self._connect(ranks)
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < ranks:
            raise EngineError(
                "Ray's cluster can never start so many ranks",
                got=f"{ranks} ranks, {cpus} CPUs in the cluster",
                expected="a CPU for each rank",
                hint="start fewer ranks, or more nodes with ray start",
            )
        groups = _module("ray.util.placement_group")
        strategies = _module("ray.util.scheduling_strategies")
        bundles = [{"CPU": 1}] * ranks
        self._group = groups.placement_group(bundles, strategy=self._strategy)
        actor, folder = self._ray.remote(AgentActor), working_folder()
        for rank in range(ranks):
            place = strategies.PlacementGroupSchedulingStrategy(self._group, rank)
            made = actor.options(num_cpus=1, max_restarts=0, scheduling_strategy=place).remote()
            self._actors.append(made)
            self._runs.append(made.run.remote(list(command), dict(variables[rank]), folder))

    def ended(self) -> str | None:
        return next(iter(self.lost().values()), None)

    def lost(self) -> Mapping[int, str]:
        if not self._runs:
            return {}
        done, _ = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        return {self._runs.index(each): self._end_of(each) for each in done}

    def _end_of(self, run: Any) -> str:
        try:
            return f"its agent ended: {self._ray.get(run)}"
        except self._ray.exceptions.RayError as error:
            return f"its actor ended: {type(error).__name__}: {error}"

    def end(self) -> None:
        if not self._ray.is_initialized():
            return
        for each in self._actors:
            self._ray.kill(each)
        if self._group is not None:
            _module("ray.util.placement_group").remove_placement_group(self._group)
        self._actors, self._runs, self._group = [], [], None
        self._ray.shutdown()

    def _connect(self, ranks: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            self._ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **quiet)
        except ConnectionError as error:
            if "RAY_ADDRESS" in os.environ:
                raise EngineError(
                    "no cluster of Ray answers",
                    got=f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}",
                    hint="start one with ray start --head, or unset RAY_ADDRESS to have one made",
                ) from None
            self._ray.init(
                num_cpus=max(ranks, os.cpu_count() or 1), include_dashboard=False, **quiet
            )
        finally:
            for number, handler in handlers.items():  # Ray puts its own in their place
                signal.signal(number, handler)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise EngineError(
            "the engine ray is not installed",
            got=f"no module {name}",
            hint="pip install ray, in the environment of plancompiler on all nodes",
        ) from None
