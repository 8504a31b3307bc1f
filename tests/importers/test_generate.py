"""Greedy generation from imported models writes the tokens that transformers does."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from tests.importers.models import made, torch
from tests.repository.test_docs import ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
# By name: without PyTorch the imports above skip this file before.
generate = import_module("examples.generate").generate
GPT2_PLAN = {
    "h.*.attn.c_proj": "replicate",
    "h.*.mlp.c_fc": "replicate",
}


def expected(module, prompts, count):
    ids = torch.tensor(prompts)
    with torch.no_grad():
        made = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return made.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_tokens_are_those_of_transformers(name):
    module, _ = made(name)
    with torch.no_grad():  # so that small random weights choose between tokens clearly
        for parameter in module.parameters():
            parameter.mul_(4)
    prompts = [[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]]
    wanted = expected(module, prompts, 12)
    assert len({tuple(row[5:]) for row in wanted}) == 2
    for ranks in (1, 2):
        plan = GPT2_PLAN if name == "gpt2" else None
        assert generate(module, prompts, 12, ranks, plan) == wanted


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_as_a_program(tmp_path):
    module, _ = made("llama")
    module.save_pretrained(tmp_path)
    command = [sys.executable, ROOT / "examples" / "generate.py", tmp_path, "--ids", "3,14,15"]
    done = subprocess.run(
        [*map(str, command), "--tokens", "4", "--ranks", "2"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    wanted = expected(module, [[3, 14, 15]], 4)[0]
    assert done.stdout.strip() == ",".join(map(str, wanted))
