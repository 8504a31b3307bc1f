"""A GPT block in float16 on one GPU: forward, backward and update, beside PyTorch.

    python -m benchmarks.gpu_block [--rounds 10] [--steps 20] [--torch-python PATH]
                                   [--dim 768] [--heads 12] [--batch 8] [--length 1024]

Prints one JSON line. `ours_ms`, `eager_ms` and `compiled_ms` are medians over the rounds of the
time of a step, the three in turn, another order each round; ratios are medians of the ratios within
a round, ours over theirs. Each takes its own time, from before the first launch to the end of the
last step on the device.

`idle` is the part of the steady state of a recorded run in which our compute stream ran nothing,
from the events around every task: where the host is ahead of the device, there is always something
to run, and what is left are the gaps between kernels.

Needs a GPU and CuPy; without them it says what is missing and ends with code 1. PyTorch is a peer
in an environment of its own, whose interpreter `--torch-python` or PLANCOMPILER_TORCH_PYTHON names;
without it only our figures are printed. `--device cpu` runs the same job on the CPU, to try the
benchmark itself.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from operator import truediv
from pathlib import Path

import plancompiler as pc
from benchmarks.step import Report, Way, say, started
from plancompiler.errors import DeviceError
from plancompiler.executor.cuda.device import CudaDevice, local_device
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.timeline import Timeline, length, merged
from plancompiler.executor.trace import Recording
from plancompiler.ir import DType
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import Plan, Stream

PEER = Path(__file__).resolve().parent / "peers" / "torch_block.py"
WARM_UP = 5
SIZES = ("dim", "heads", "batch", "length")


def block(options: argparse.Namespace) -> pc.Job:
    """One transformer block on random numbers, all of it in float16."""
    mesh = pc.Placement(options.device, [0])
    with pc.job("block") as job:
        model = pc.nn.TransformerBlock(options.dim, options.heads)
        for parameter in model.parameters():
            parameter.dtype = DType.FLOAT16
        model.place(mesh)
        shape = (options.batch, options.length, options.dim)
        x = pc.nn.Parameter(shape, "float16", "normal", (0.0, 1.0), trainable=False)
        loss = pc.square(model(x.place(mesh).value)).mean()
        pc.optim.SGD(lr=1e-3).minimize(loss)
        pc.output("loss", loss)
    return job


def plans_of(options: argparse.Namespace) -> dict[int, Plan]:
    return dict(compile_plans(block(options), 1).plans)


def serve(options: argparse.Namespace) -> None:
    """Our side, with the same manners as the peers: a number of steps in, seconds out."""
    with LocalWorld(plans_of(options)) as world:
        say({"version": "", "loss": float(world.run(1)[0]["loss"])})
        for line in sys.stdin:
            steps = int(line)
            begin = time.perf_counter()
            world.run(steps)
            say({"seconds": (time.perf_counter() - begin) / steps})


def idle_share(options: argparse.Namespace) -> float:
    """Part of the time in which the compute stream had nothing to run."""
    with Recording() as recording:
        with LocalWorld(plans_of(options), record=recording.folder) as world:
            world.run(WARM_UP)
            world.run(options.steps)
        (timeline,) = recording.timelines()
    return idle_of(timeline, WARM_UP)


def idle_of(timeline: Timeline, first: int) -> float:
    """The idle part of the compute stream from step `first` of the recording on."""
    later = Timeline(
        timeline.job,
        timeline.rank,
        timeline.first_step + first,
        timeline.tasks,
        timeline.registers,
        timeline.begins[first:],
        timeline.ends[first:],
    )
    spans = later.spans(lambda task: task.stream == str(Stream.COMPUTE))
    whole = int(spans[:, 1].max() - spans[:, 0].min())
    return 1.0 - length(merged(spans)) / whole


def device_name(device: str) -> str:
    """What the GPU is called; DeviceError where there is none."""
    if device == "cpu":
        return "cpu"
    cupy = CudaDevice(local_device(0)).arrays
    name: bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return name.decode()


def main() -> None:
    """Measure, or say what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "rounds": 10,
        "steps": 20,
        "dim": 768,
        "heads": 12,
        "batch": 8,
        "length": 1024,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--torch-python", default=os.environ.get("PLANCOMPILER_TORCH_PYTHON"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        name = device_name(options.device)
        if options.serve:
            serve(options)
        else:
            measure(options, name)
    except DeviceError as error:
        sys.exit(f"{error}\nnothing was measured")


def measure(options: argparse.Namespace, name: str) -> None:
    sizes = [word for size in SIZES for word in (f"--{size}", str(getattr(options, size)))]
    commands = {
        "ours": [
            *(sys.executable, "-m", "benchmarks.gpu_block", "--serve"),
            *("--device", options.device, *sizes),
        ]
    }
    if options.torch_python and options.device == "cuda":
        for peer in ("eager", "compiled"):
            commands[peer] = [options.torch_python, str(PEER), "--how", peer, *sizes]
    else:
        print("PyTorch is left out: it needs --torch-python and a GPU", file=sys.stderr)
    figures: Report = {
        "benchmark": "gpu_block",
        "device": name,
        **{each: getattr(options, each) for each in SIZES},
    }
    with ExitStack() as stack:
        ways = [
            Way(way, stack.enter_context(started(command))) for way, command in commands.items()
        ]
        times: dict[str, list[float]] = {way.name: [] for way in ways}
        for way in ways:
            way.seconds(WARM_UP)
            figures[f"{way.name}_version"] = way.about["version"]
        for _ in range(options.rounds):
            for way in random.sample(ways, len(ways)):
                times[way.name].append(way.seconds(options.steps))
    for way_name, seconds in times.items():
        figures[f"{way_name}_ms"] = round(1e3 * statistics.median(seconds), 3)
        if way_name != "ours":
            ratios = map(truediv, times["ours"], seconds)
            figures[f"to_{way_name}"] = round(statistics.median(ratios), 3)
    figures["idle"] = round(idle_share(options), 4)
    say(figures)


if __name__ == "__main__":
    main()
