"""Greedy generation with a causal model of transformers: it is imported, and its key-value cache
lives on the ranks.

    python examples/generate.py FOLDER --prompt "The for statement" --tokens 40 --ranks 2
    python examples/generate.py FOLDER --ids 3,14,15 --tokens 20

FOLDER has a `config.json`, safetensors files and, for `--prompt`, a tokenizer, as `save_pretrained`
writes them. Several ranks split the model's layers, by its tensor-parallel plan or by one that
`--plan` names in a JSON file, and the heads of the cache with them. Needs PyTorch and transformers.

The job computes one token. The cache has a place for each position; a step writes the keys and
values of its position into it and reads the places up to there. So the job is compiled once, and a
prompt is read token by token. Models whose attention looks back over a window generate no further
than that window.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin

import plancompiler as pc


class Places(CacheLayerMixin):
    """The cache of a layer, with a place for each position; `here` is where a step writes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, here: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.here = keys, values, here
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, with those of this step."""
        self.keys = torch.where(self.here, key_states, self.keys)
        self.values = torch.where(self.here, value_states, self.values)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a mask is for, and the first of them."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Positions are given, and do not count from here."""
        return 0

    def get_max_length(self) -> int:
        """Places."""
        return int(self.keys.shape[2])


class Decoder(torch.nn.Module):
    """One step of generation: a token and its position to the token that is likeliest to follow."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.length = length
        with torch.no_grad():
            tokens = torch.zeros((batch, 1), dtype=torch.long)
            layers = model(tokens, use_cache=True).past_key_values.layers
        self.layers = len(layers)
        for number, layer in enumerate(layers):
            for name, states in (("keys", layer.keys), ("values", layer.values)):
                shape = (batch, states.shape[1], length, states.shape[3])
                self.register_buffer(f"{name}_{number}", torch.zeros(shape, dtype=states.dtype))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, 1] at one position [1] to the next ones [batch]."""
        steps = torch.arange(self.length)
        here = (steps == position).view(1, 1, -1, 1)
        seen = (steps <= position).view(1, 1, 1, -1).expand(tokens.shape[0], -1, -1, -1)
        places = [
            Places(getattr(self, f"keys_{number}"), getattr(self, f"values_{number}"), here)
            for number in range(self.layers)
        ]
        result = self.model(
            tokens,
            attention_mask=seen,
            position_ids=position.expand(tokens.shape[0], 1),
            past_key_values=Cache(layers=places),
            use_cache=True,
        )
        for number, layer in enumerate(places):
            getattr(self, f"keys_{number}").copy_(layer.keys)
            getattr(self, f"values_{number}").copy_(layer.values)
        return result.logits[:, -1].argmax(-1)


def build(
    module: Any, batch: int, length: int, ranks: int = 1, plan: dict[str, str] | None = None
) -> pc.Job:
    """The job of one step: `tokens` [batch, 1] and `position` [1] are fed, `next` [batch] comes."""
    decoder = Decoder(module.eval(), batch, length).eval()
    example = {
        "tokens": torch.zeros((batch, 1), dtype=torch.long),
        "position": torch.zeros(1, dtype=torch.long),
    }
    model = pc.from_torch(decoder, example)
    mesh = pc.Placement("cpu", np.arange(ranks), axes=("tp",))
    model.place(mesh)
    if ranks > 1:
        layout = pc.layouts.tensor_parallel(plan or module.config, axis="tp")
        for name, (place, sbp) in layout.places(model, mesh).items():
            dict(model.named_parameters(remove_duplicate=False))[name].place(place, sbp)
        for name, cache in model.named_parameters():
            if name.startswith(("keys_", "values_")):
                cache.place(mesh, ["S(1)"])
    with pc.job("generate") as job:
        tokens = pc.input("tokens", (batch, 1), "int64", mesh)
        position = pc.input("position", (1,), "int64", mesh)
        pc.output("next", model(tokens, position))
    return job


def generate(
    module: Any,
    prompts: Sequence[Sequence[int]],
    count: int,
    ranks: int = 1,
    plan: dict[str, str] | None = None,
) -> list[list[int]]:
    """The prompts, which are equally long, each with `count` tokens that the model adds."""
    texts = np.array(prompts, np.int64)
    job = build(module, len(texts), texts.shape[1] + count, ranks, plan)
    with pc.run(job, ranks=ranks) as session:
        for position in range(texts.shape[1] + count - 1):
            outputs = session.step(
                tokens=texts[:, position : position + 1], position=np.array([position])
            )
            if position + 1 == texts.shape[1]:
                texts = np.concatenate([texts, np.asarray(outputs["next"])[:, None]], axis=1)
    return [row.tolist() for row in texts]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt")
    given.add_argument("--ids", help="token numbers with commas")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--plan", type=Path, help="modules and styles, as JSON")
    options = parser.parse_args()
    module = transformers.AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.float32, local_files_only=True
    )
    plan = json.loads(options.plan.read_text()) if options.plan else None
    if options.ids:
        prompt = [int(each) for each in options.ids.split(",")]
        print(*generate(module, [prompt], options.tokens, options.ranks, plan)[0], sep=",")
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
    prompt = tokenizer(options.prompt)["input_ids"]
    print(tokenizer.decode(generate(module, [prompt], options.tokens, options.ranks, plan)[0]))


if __name__ == "__main__":
    main()
