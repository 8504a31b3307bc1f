"""A byte-level GPT of fused transformer layers, as a compiled job or with eager tensors.

    plancompiler run examples/fused_gpt.py -D dp=2 -D tp=2 --ranks 4 --steps 100
    plancompiler launch -n 4 examples/fused_gpt.py --tp 2 --steps 100
    plancompiler launch -n 4 examples/fused_gpt.py --tp 2 --steps 100 --compiled

It reads the text that `examples/gpt.py` reads. The mesh has `dp` times `tp` ranks. Each half of a
layer is split over `tp` and reduces once; embedding, output layer and loss are split by vocabulary,
so that logits are never gathered. DistributedFusedLamb reduces gradients to shards over `dp`, which
also hold its moments. Weights, batches, dropout and losses are the same in every form and layout.
"""

import argparse
import math
from typing import Any, Self

from gpt import positive, text_file

import plancompiler as pc

VOCABULARY = 256
DATA_SBP = ["S(0)", "B"]
"""Sequences over (dp, tp)."""
BY_WORD = ["B", "S(0)"]
"""Rows of the embedding and of the output layer over (dp, tp)."""


class FusedGPT(pc.nn.Module):
    """Bytes to logits, with rotary positions."""

    def __init__(self, layers: int, dim: int, heads: int, dropout: float) -> None:
        std = 0.02
        projection_std = std / math.sqrt(2 * layers)
        self.token = pc.nn.Embedding(VOCABULARY, dim, std=std)
        self.layers = pc.nn.ModuleList(
            pc.nn.FusedTransformerLayer(
                pc.nn.FusedAttention(
                    dim,
                    heads,
                    dropout=dropout,
                    attention_dropout=dropout,
                    rotary_base=10000.0,
                    std=std,
                    projection_std=projection_std,
                ),
                pc.nn.FusedFeedForward(
                    dim, 4 * dim, dropout=dropout, std=std, projection_std=projection_std
                ),
            )
            for _ in range(layers)
        )
        self.norm = pc.nn.LayerNorm(dim)
        self.head = pc.nn.Linear(dim, VOCABULARY, bias=False, std=std)

    def place_split(self, mesh: pc.Placement) -> Self:
        """On a mesh of axes (dp, tp)."""
        self.place(mesh, {"token.weight": BY_WORD, "head.weight": BY_WORD})
        for layer in self.layers:
            layer.place_split(mesh, "tp")
        return self

    def forward(self, tokens: Any) -> Any:
        """Tokens [batch, length] to logits [batch, length, 256], split by vocabulary."""
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Training:
    """Model, data and optimizer of one mesh, whether ops are recorded or run at once."""

    def __init__(
        self,
        mesh: pc.Placement,
        layers: int = 2,
        dim: int = 64,
        heads: int = 4,
        length: int = 64,
        batch: int = 8,
        dropout: float = 0.1,
        lr: float = 0.03,
        total: int = 100,
        text: str | None = None,
    ) -> None:
        positive("total", total)
        self.mesh, self.batch, self.length = mesh, batch, length
        self.path = text_file(text)
        self.model = FusedGPT(layers, dim, heads, dropout).place_split(mesh)
        rate = pc.optim.cosine(lr, warmup=min(10, total - 1), total=total, final=lr / 10)
        self.optimizer = pc.optim.DistributedFusedLamb(rate, betas=(0.9, 0.95), max_norm=1.0)

    def data(self) -> tuple[Any, Any]:
        """Tokens and the tokens that follow them, of the current step."""
        return tuple(
            pc.data.TokenFile(self.path, self.batch, self.length, placement=self.mesh, sbp=DATA_SBP)
        )

    def learn(self, tokens: Any, targets: Any) -> Any:
        """One step; returns its loss."""
        losses = pc.c_softmax_with_cross_entropy(self.model(tokens), targets, ignore_index=None)
        loss = losses.mean()
        self.optimizer.minimize(loss)
        return loss


def mesh_of(dp: int | None, tp: int, ranks: int | None, device: str = "cpu") -> pc.Placement:
    """A mesh of `dp` times `tp` ranks; without `dp` it is what `ranks` leaves."""
    positive("tp", tp)
    if dp is None:
        dp = max(1, (ranks or tp) // tp)
    positive("dp", dp)
    if ranks is not None and dp * tp != ranks:
        raise pc.UsageError(
            "dp * tp must be the number of ranks", got=f"{dp} * {tp} with {ranks} ranks"
        )
    rows = [[row * tp + column for column in range(tp)] for row in range(dp)]
    return pc.Placement(device, rows, ("dp", "tp"))


def build(
    dp: int | None = None,
    tp: int = 1,
    ranks: int | None = None,
    seed: int = 0,
    zero: int | None = None,
    device: str = "cpu",
    **sizes: Any,
) -> pc.Job:
    """The training job. `sizes` are parameters of Training. By default gradients and moments are
    split over `dp` (`zero` 2) where it has several ranks.
    """
    mesh = mesh_of(dp, tp, ranks, device)
    if zero is None:
        zero = 2 if mesh.hierarchy[0] > 1 else 0
    with pc.job("fused_gpt", seed=seed, config=pc.Config(zero=zero)) as job:
        training = Training(mesh, **sizes)
        pc.output("loss", training.learn(*training.data()))
    return job


def train(
    steps: int = 100,
    dp: int | None = None,
    tp: int = 1,
    ranks: int | None = None,
    seed: int = 0,
    compiled: bool = False,
    device: str = "cpu",
    **sizes: Any,
) -> list[float]:
    """The same with eager tensors: the losses of the steps. With `compiled` the step is compiled by
    `pc.compile`. Runs on all ranks of the program, or on the first `ranks`.
    """
    generator = pc.manual_seed(seed)
    training = Training(mesh_of(dp, tp, ranks or pc.init().size, device), **sizes)
    step = pc.compile(training.learn) if compiled else training.learn
    losses = []
    for number in range(steps):
        generator.start_step(number)
        losses.append(step(*training.data()).item())
    return losses


def main() -> None:
    """Train and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--compiled", action="store_true", help="compile the training step")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    world = pc.init()
    total = max(2, given.steps)
    losses = train(
        given.steps, tp=given.tp, compiled=given.compiled, device=given.device, total=total
    )
    if world.rank == 0:
        for number in range(0, len(losses), max(1, len(losses) // 10)):
            print(f"step {number}: loss {losses[number]:.4f}")
        print(f"after {len(losses)} steps: loss {losses[-1]:.4f} nats per byte")


if __name__ == "__main__":
    main()
