"""Which signature an op gets."""

from __future__ import annotations

import random

import pytest

from plancompiler.boxing.infer_sbp import Operand, cheapest_signature
from plancompiler.boxing.planner import boxing_path
from plancompiler.ir import BROADCAST, DType, NdSbp, Partial, TensorType, freeze_attrs
from plancompiler.ops.registry import infer_types, mesh_signatures, op_def
from tests.ops.samples import samples


def dearest_first(candidates, operands, outputs, hierarchy) -> list:
    """All candidates with their four prices, none left out, the cheapest and earliest last."""
    priced = []
    for number, candidate in enumerate(candidates):
        moved = reduced = owed = 0.0
        for operand, wanted in zip(operands, candidate.inputs, strict=True):
            one, other = operand.seconds(wanted, hierarchy)
            moved, reduced = moved + one, reduced + other
        for tensor, sbp in zip(outputs, candidate.outputs, strict=True):
            whole = NdSbp(tuple(BROADCAST if isinstance(each, Partial) else each for each in sbp))
            owed += sum(step.seconds for step in boxing_path(sbp, whole, *tensor, hierarchy))
        pairs = zip(operands, candidate.inputs, strict=True)
        changed = sum(operand.made != wanted for operand, wanted in pairs)
        priced.append(((moved, reduced + owed, reduced, changed), number, candidate))
    return sorted(priced, key=lambda each: each[:2], reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("hierarchy", [(2,), (3,), (2, 2), (2, 3), (4, 1)])
def test_the_cheapest_signature_is_that_of_pricing_all(hierarchy, tmp_path, record_property):
    chosen = random.Random(7)
    pool = [sample for sample in samples(tmp_path) if sample.inputs and sample.kind != "output"]
    checked = 0
    for sample in chosen.sample(pool, 150):
        types = tuple(TensorType(array.shape, DType.parse(array.dtype)) for array in sample.inputs)
        outputs = infer_types(sample.kind, types, sample.attrs)
        attrs = freeze_attrs(sample.attrs)
        candidates = mesh_signatures(sample.kind, types, outputs, attrs, hierarchy)
        if len(candidates) > 200 or op_def(sample.kind).mutates:
            continue
        for _ in range(3):
            # Layouts that some signatures take, so that much of what is wanted is there already.
            operands = [
                Operand(
                    tensor,
                    chosen.choice(candidates).inputs[slot].without_halos(),
                    frozenset(
                        chosen.choice(candidates).inputs[slot]
                        for _ in range(chosen.choice([0, 0, 0, 1, 2]))
                    ),
                )
                for slot, tensor in enumerate(types)
            ]
            expected = dearest_first(candidates, operands, outputs, hierarchy)[-1]
            got = cheapest_signature(sample.kind, candidates, operands, outputs, hierarchy)
            assert got == expected[2], (str(sample), [str(each.made) for each in operands])
            checked += 1
    assert checked > 100
    record_property(f"choices_of_signatures_checked,_{hierarchy}", checked)
