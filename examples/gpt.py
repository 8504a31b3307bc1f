"""A byte-level GPT on real text, with data, context, tensor and pipeline parallelism.

    plancompiler run examples/gpt.py -D dp=2 -D tp=2 --ranks 4 --steps 300
    python examples/gpt.py train --steps 300 --save checkpoint
    python examples/gpt.py sample --restore checkpoint --prompt "The for statement"

The text is Python's own documentation (`pydoc_data.topics`) unless `-D text=FILE` names another.
The mesh has `dp` times `cp` times `tp` ranks for each of `pp` pipeline stages, whose layers are
dealt in `chunks` runs per stage where the schedule is interleaved. With `cp` sequences are split,
too: attention passes keys and values round (context parallelism), in an order that gives all ranks
the same work. The batch is global, so the losses do not
depend on the layout. The presets gpt2 and gpt3-175b are there to be compiled. With
`-D device=cuda` every rank runs on a GPU.
"""

import argparse
import hashlib
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics

import numpy as np

import plancompiler as pc


@dataclass(frozen=True)
class Config:
    """The sizes of a model and of its batches."""

    layers: int
    dim: int
    heads: int
    length: int
    vocabulary: int
    batch: int


PRESETS = {
    "tiny": Config(layers=4, dim=256, heads=4, length=128, vocabulary=256, batch=8),
    "gpt2": Config(layers=12, dim=768, heads=12, length=1024, vocabulary=50257, batch=8),
    "gpt3-175b": Config(layers=96, dim=12288, heads=96, length=2048, vocabulary=51200, batch=1536),
}


class GPT(pc.nn.Module):
    """Token and position embeddings, pre-norm transformer blocks, a final norm and the output
    layer.

    Each stage has `chunks` runs of neighbouring layers, dealt in turn: run c is on stage
    c mod stages.
    """

    def __init__(
        self,
        config: Config,
        stages: list[pc.Placement],
        dropout: float = 0.0,
        chunks: int = 1,
        split_vocabulary: bool = False,
        placed: bool = True,
    ) -> None:
        rows = {"weight": BY_OUTPUT} if split_vocabulary else {}
        block_layouts = TENSOR_PARALLEL if placed else {}
        std = 0.02
        self.pieces = pieces_of(stages[0])
        chunks = len(stages) * chunks
        self.stages = [
            stages[layer * chunks // config.layers % len(stages)] for layer in range(config.layers)
        ]
        self.token = pc.nn.Embedding(config.vocabulary, config.dim, std=std)
        self.position = pc.nn.Parameter((config.length, config.dim), "float32", "normal", (0, std))
        self.blocks = pc.nn.ModuleList(
            pc.nn.TransformerBlock(
                config.dim,
                config.heads,
                dropout,
                std=std,
                projection_std=std / math.sqrt(2 * config.layers),
                zigzag=self.pieces,
            )
            for _ in range(config.layers)
        )
        self.norm = pc.nn.LayerNorm(config.dim)
        self.head = pc.nn.Linear(config.dim, config.vocabulary, bias=False, std=std)
        self.token.place(stages[0], on_mesh(stages[0], rows))
        self.position.place(stages[0])
        for block, stage in zip(self.blocks, self.stages, strict=True):
            block.place(stage, on_mesh(stage, block_layouts))
        self.norm.place(stages[-1])
        self.head.place(stages[-1], on_mesh(stages[-1], rows))

    def forward(self, tokens: pc.Value) -> pc.Value:
        """Tokens [batch, length] to logits [batch, length, vocabulary], both in zigzag order where
        sequences are split.
        """
        x = self.token(tokens) + balanced(self.position.value, 0, self.pieces)
        for block, stage in zip(self.blocks, self.stages, strict=True):
            x = block(x.redistribute(placement=stage))
        return self.head(self.norm(x))


# Per mesh axis (dp, tp). Weights that read the residual stream are split by outputs, those that
# write to it by inputs: one reduction per half block.
BY_OUTPUT, BY_INPUT = ["B", "S(0)"], ["B", "S(1)"]
TENSOR_PARALLEL = {
    "attention.query.weight": BY_OUTPUT,
    "attention.query.bias": BY_OUTPUT,
    "attention.key.weight": BY_OUTPUT,
    "attention.key.bias": BY_OUTPUT,
    "attention.value.weight": BY_OUTPUT,
    "attention.value.bias": BY_OUTPUT,
    "attention.projection.weight": BY_INPUT,
    "mlp.fc1.weight": BY_OUTPUT,
    "mlp.fc1.bias": BY_OUTPUT,
    "mlp.fc2.weight": BY_INPUT,
}


def on_mesh(mesh: pc.Placement, layouts: dict[str, list[str]]) -> dict[str, list[str]]:
    """Layouts for (dp, tp) on a mesh that may have an axis for parts of sequences between."""
    if mesh.ndim == 2:
        return layouts
    return {name: [first, "B", last] for name, (first, last) in layouts.items()}


def pieces_of(mesh: pc.Placement) -> int:
    """In how many pieces sequences are split; 0 where they are not."""
    return mesh.hierarchy[1] if mesh.ndim == 3 else 0


def balanced(x: pc.Value, axis: int, pieces: int) -> pc.Value:
    """A sequence in the order that gives all ranks the same work in causal attention."""
    return pc.zigzag(x, axis, pieces) if pieces else x


def build(
    preset: str = "tiny",
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ranks: int | None = None,
    layers: int | None = None,
    dim: int | None = None,
    heads: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    vocabulary: int | None = None,
    split_vocabulary: bool = False,
    text: str | None = None,
    lr: float = 6e-4,
    total: int = 400,
    dropout: float = 0.0,
    seed: int = 0,
    zero: int = 0,
    prefetch: int | None = None,
    sequence_parallel: bool = False,
    microbatches: int = 1,
    schedule: str = "gpipe",
    chunks: int = 1,
    fuse_bytes: int | None = None,
    layout: str | None = None,
    streams: str | None = None,
    recompute: str = "none",
    memory_bytes: int | None = None,
    precision: str = "float32",
    loss_scale: int | None = None,
    loss_scale_steps: int | None = None,
    passes: str | None = None,
    device: str = "cpu",
) -> pc.Job:
    """The training job. `batch` is the number of sequences of all ranks together; `total` is the
    number of steps over which the learning rate decays. Without `dp`, it is what `ranks` leaves.
    With `cp` each sequence is split over so many ranks.
    `chunks` is for the interleaved schedule: runs of layers per stage. With `split_vocabulary` the
    rows of the embedding and of the output layer are split over `tp`. With `layout=auto` nothing is
    placed, and the compiler searches. The others from `zero` on
    are settings of pc.Config; `passes` is a list with commas.
    """
    compiling = {
        "zero": zero,
        "prefetch": prefetch,
        "sequence_parallel": bool(sequence_parallel),
        "microbatches": microbatches,
        "schedule": schedule,
        "fuse_bytes": fuse_bytes,
        "layout": layout,
        "streams": streams,
        "recompute": recompute,
        "memory_bytes": memory_bytes,
        "precision": precision,
        "loss_scale": loss_scale,
        "loss_scale_steps": loss_scale_steps,
        "passes": passes,
    }
    how = pc.Config.of({name: value for name, value in compiling.items() if value is not None})
    config = configured(
        preset,
        layers=layers,
        dim=dim,
        heads=heads,
        length=length,
        batch=batch,
        vocabulary=vocabulary,
    )
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not lr > 0:
        raise pc.UsageError("lr must be a positive number", got=repr(lr))
    positive("total", total)
    stages = stage_meshes(config, dp, cp, tp, pp, ranks, device)
    check_chunks(config, pp, chunks, schedule)
    path = text_file(text)
    placed = layout != "auto"
    data_sbp = ["S(0)", *["B"] * (stages[0].ndim - 1)] if placed else None

    def batches(stage: pc.Placement) -> pc.data.TokenFile:
        return pc.data.TokenFile(
            path,
            batch=config.batch,
            length=config.length,
            dtype="uint8",
            seed=seed,
            placement=stage,
            sbp=data_sbp,
        )

    with pc.job("gpt", seed=seed, config=how) as job:
        model = GPT(config, stages, dropout, chunks, split_vocabulary, placed)
        # The first stage needs the tokens, the last the targets; what a batch holds depends on the
        # seed and the step alone, so both read the file themselves.
        tokens, targets = batches(stages[0]).tokens, batches(stages[-1]).targets
        if cp > 1:
            # They are put in order whole, as they are small, and split then.
            split = ["S(0)", "S(1)", "B"]
            tokens = balanced(tokens, 1, cp).redistribute(sbp=split)
            targets = balanced(targets, 1, cp).redistribute(sbp=split)
        logits = model(tokens)
        loss = pc.cross_entropy(logits, targets, ignore_index=None)
        rate = pc.optim.cosine(lr, warmup=min(20, total - 1), total=total, final=lr / 10)
        pc.optim.AdamW(rate, betas=(0.9, 0.95), weight_decay=0.01).minimize(loss)
        pc.output("loss", loss)
    return job


def positive(name: str, value: object) -> int:
    """A whole number of at least one, or a UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise pc.UsageError(f"{name} must be a positive whole number", got=repr(value))
    return value


def configured(preset: str, **changes: int | None) -> Config:
    """A preset with some sizes changed."""
    if preset not in PRESETS:
        raise pc.UsageError(
            "unknown preset", got=repr(preset), expected="one of " + ", ".join(PRESETS)
        )
    given = {name: positive(name, value) for name, value in changes.items() if value is not None}
    return replace(PRESETS[preset], **given)


def stage_meshes(
    config: Config, dp: int | None, cp: int, tp: int, pp: int, ranks: int | None, device: str
) -> list[pc.Placement]:
    """One (dp, tp) mesh per pipeline stage, over consecutive ranks; with `cp` (dp, cp, tp)."""
    positive("cp", cp)
    positive("tp", tp)
    positive("pp", pp)
    if dp is None:
        dp = 1 if ranks is None else max(1, ranks // (cp * tp * pp))
    positive("dp", dp)
    if ranks is not None and dp * cp * tp * pp != ranks:
        raise pc.UsageError(
            "dp * cp * tp * pp must be the number of ranks",
            got=f"{dp} * {cp} * {tp} * {pp} = {dp * cp * tp * pp} with {ranks} ranks",
        )
    if pp > config.layers:
        raise pc.UsageError(
            "a pipeline stage needs at least one layer", got=f"pp={pp}, {config.layers} layers"
        )
    shape, axes = ((dp, tp), ("dp", "tp")) if cp == 1 else ((dp, cp, tp), ("dp", "cp", "tp"))
    ranks_of = np.arange(pp * dp * cp * tp).reshape(pp, *shape)
    return [pc.Placement(device, ranks_of[stage], axes) for stage in range(pp)]


def check_chunks(config: Config, pp: int, chunks: int, schedule: str) -> None:
    """A UsageError where the layers cannot be dealt in so many runs."""
    positive("chunks", chunks)
    if chunks > 1 and schedule != "interleaved":
        raise pc.UsageError(
            "only the interleaved schedule has several chunks per stage",
            got=f"chunks={chunks} schedule={schedule}",
            expected="schedule=interleaved",
        )
    if chunks * pp > config.layers:
        raise pc.UsageError(
            "every chunk of a stage needs at least one layer",
            got=f"chunks={chunks} for each of pp={pp} stages, {config.layers} layers",
        )


def text_file(text: str | None = None) -> Path:
    """The file to train on: `text`, or Python's documentation, written once to the user's cache."""
    if text is not None:
        return Path(text)
    content = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plancompiler"
    path = cache / f"python-topics-{hashlib.sha256(content).hexdigest()[:16]}.txt"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Several processes may do this at once: each writes its own file and moves it into place.
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    return path


def byte_entropy(path: Path) -> float:
    """Entropy of the byte frequencies of a file, in nats per byte: the loss of a model that knows
    only how often each byte occurs.
    """
    counts = np.bincount(np.frombuffer(path.read_bytes(), np.uint8), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def build_sampler(
    preset: str = "tiny", layers: int | None = None, dim: int | None = None, **sizes: int | None
) -> pc.Job:
    """The inference job: `tokens` [1, length] are fed, `logits` [1, length, vocabulary] come
    back.
    """
    config = configured(preset, layers=layers, dim=dim, **sizes)
    mesh = pc.Placement("cpu", [[0]], ("dp", "tp"))
    with pc.job("gpt-sample") as job:
        model = GPT(config, [mesh]).eval()
        tokens = pc.input("tokens", (1, config.length), "int64", mesh)
        pc.output("logits", model(tokens))
    return job


def sample(
    restore: str | Path,
    prompt: str = "The ",
    length: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
    preset: str = "tiny",
    **sizes: int | None,
) -> str:
    """`length` bytes that the trained model writes after `prompt`, with the prompt.

    `temperature` divides the logits; 0 takes the likeliest byte each time.
    """
    if not prompt:
        raise pc.UsageError("a prompt is needed to start from")
    job = build_sampler(preset, **sizes)
    window = job.inputs["tokens"].shape[1]
    random = np.random.default_rng(seed)
    text = bytearray(prompt.encode())
    # The optimizer's variables are of no use here.
    with pc.run(job, ranks=1, restore=restore, strict_restore=False) as session:
        for _ in range(length):
            seen = text[-window:]
            # What stands after the last byte is padding: no position sees later ones.
            tokens = np.zeros((1, window), np.int64)
            tokens[0, : len(seen)] = np.frombuffer(bytes(seen), np.uint8)
            logits = session.step(tokens=tokens)["logits"][0, len(seen) - 1, :256]
            text.append(choose(logits.astype(np.float64), temperature, random))
    return bytes(text).decode(errors="replace")


def choose(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """An index drawn with probability softmax(logits / temperature)."""
    if temperature <= 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature)
    return int(random.choice(len(weights), p=weights / weights.sum()))


def train(save: Path | None, steps: int, **config: object) -> None:
    """Train, print the loss every ten steps, and save the variables."""
    job = build(total=steps, **config)
    path = text_file(config.get("text"))
    print(f"byte-frequency entropy of {path.name}: {byte_entropy(path):.3f} nats")
    with pc.run(job, ranks=job.world_size) as session:
        for step, outputs in enumerate(session.run(steps, save=save)):
            loss = float(outputs["loss"])
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step:5d}  loss {loss:.4f}", flush=True)
        if save is not None:
            print(f"saved to {save}")


def main() -> int:
    """`train` and `sample` from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train on one machine and save the model")
    training.add_argument("--steps", type=int, default=300)
    training.add_argument("--save", type=Path, help="directory for the trained variables")
    training.add_argument("--text", help="file to train on")
    training.add_argument("--device", default="cpu", help="cpu or cuda")
    for name in ("dp", "cp", "tp", "pp"):
        training.add_argument(f"--{name}", type=int, default=1)
    sampling = commands.add_parser("sample", help="write text with a trained model")
    sampling.add_argument("--restore", type=Path, required=True)
    sampling.add_argument("--prompt", default="The ")
    sampling.add_argument("--length", type=int, default=200)
    sampling.add_argument("--temperature", type=float, default=0.7)
    sampling.add_argument("--seed", type=int, default=0)
    for command in (training, sampling):
        command.add_argument("--preset", default="tiny", choices=sorted(PRESETS))
        for name in ("layers", "dim", "heads"):
            command.add_argument(f"--{name}", type=int)
    options = vars(parser.parse_args())
    command = options.pop("command")
    try:
        if command == "train":
            train(**options)
        else:
            print(sample(**options))
    except pc.PlanCompilerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
