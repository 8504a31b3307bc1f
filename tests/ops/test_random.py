"""Random numbers must follow from the global index alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import AttributeValueError, DataError, DTypeError
from plancompiler.ir import DType
from plancompiler.ir.shard import balanced_range, region_index
from plancompiler.ops import random
from plancompiler.ops.initializer import INITIALIZERS, initialize
from tests.ops.sharding import run_dense

quick = settings(max_examples=60, deadline=None)


@st.composite
def shapes_and_regions(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    region = []
    for extent in shape:
        start = draw(st.integers(0, extent))
        region.append((start, draw(st.integers(start, extent))))
    return shape, tuple(region)


def whole(shape):
    return tuple((0, extent) for extent in shape)


@quick
@given(shapes_and_regions(), st.integers(0, 2**63), st.integers(0, 99), st.integers(1, 40))
def test_a_region_holds_the_numbers_of_the_whole(place, seed, step, words):
    shape, region = place
    before = random._WORDS_AT_ONCE
    for function in (random.uniform, random.normal):
        everything = function(seed, "weight", step, shape, whole(shape))
        random._WORDS_AT_ONCE = words
        try:
            part = function(seed, "weight", step, shape, region)
        finally:
            random._WORDS_AT_ONCE = before
        np.testing.assert_array_equal(part, everything[region_index(region)])


@quick
@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_of_any_number_of_devices_make_the_whole(extent, parts):
    shards = [
        random.uniform(1, 2, 3, (extent,), (balanced_range(extent, parts, index),))
        for index in range(parts)
    ]
    expected = random.uniform(1, 2, 3, (extent,), ((0, extent),))
    np.testing.assert_array_equal(np.concatenate(shards), expected)


@quick
@given(st.integers(0, 60), st.integers(0, 2**64 - 1))
def test_a_permutation_has_every_number_once(n, seed):
    actual = random.permutation(seed, "rows", n)
    assert actual.dtype == np.int64
    assert sorted(actual.tolist()) == list(range(n))


def test_words_are_those_of_splitmix64():
    """The first outputs of the reference implementation started at 1234567."""
    actual = random.words(1234567, (5,), ((0, 5),))
    assert actual.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_one_word_and_many_words_mix_alike():
    values = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    mixed = values.copy()
    random.mix_words(mixed, np.empty_like(mixed))
    assert mixed.tolist() == [random.mix(int(value)) for value in values]


def test_streams_differ_by_seed_key_and_step():
    names = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, 1, 0), (1, 0, 0), (0, 0, 1)]
    assert len({random.stream(*name) for name in names}) == len(names)


@pytest.mark.processes
def test_streams_do_not_depend_on_the_hash_seed():
    code = "from plancompiler.ops import random; print(random.stream(3, 'layer.weight', 2))"
    results = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert results == {f"{random.stream(3, 'layer.weight', 2)}\n"}


def test_uniform_and_normal_have_their_moments():
    shape = (200, 500)
    flat = random.uniform(0, "u", 0, shape, whole(shape))
    assert flat.min() >= 0
    assert flat.max() < 1
    assert flat.mean() == pytest.approx(0.5, abs=0.005)
    assert np.histogram(flat, 10, (0, 1))[0] == pytest.approx(np.full(10, 1e4), rel=0.05)
    bell = random.normal(0, "n", 0, shape, whole(shape))
    assert bell.mean() == pytest.approx(0, abs=0.01)
    assert bell.std() == pytest.approx(1, abs=0.01)
    assert (bell**3).mean() == pytest.approx(0, abs=0.05)
    assert (bell**4).mean() == pytest.approx(3, abs=0.1)
    # Neighbours along either axis are not correlated.
    assert (bell[1:] * bell[:-1]).mean() == pytest.approx(0, abs=0.02)
    assert (bell[:, 1:] * bell[:, :-1]).mean() == pytest.approx(0, abs=0.02)


# --- dropout --------------------------------------------------------------------------------------


def dropout(x, rate=0.25, key=5, seed=1, step=0):
    return run_dense("dropout", [x], {"rate": rate, "key": key}, seed=seed, step=step)[0]


def test_dropout_keeps_the_mean_and_the_share():
    actual = dropout(np.ones((400, 301), np.float32))
    assert set(np.unique(actual)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (actual == 0).mean() == pytest.approx(0.25, abs=0.01)
    # Rows, columns and the two halves of each word are independent of each other.
    dropped = (actual == 0) - 0.25
    for pair in (dropped[1:] * dropped[:-1], dropped[:, 1:] * dropped[:, :-1]):
        assert pair.mean() == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize("change", [{"key": 6}, {"seed": 2}, {"step": 1}])
def test_dropout_masks_differ_by_key_seed_and_step(change):
    x = np.ones((50, 7))
    assert (dropout(x) != dropout(x, **change)).any()
    np.testing.assert_array_equal(dropout(x), dropout(x))


# --- initialisers ---------------------------------------------------------------------------------

ARGS = {"constant": (2.5,), "normal": (1.0, 0.5), "uniform": (-1.0, 3.0)}
MADE = [init for init in INITIALIZERS if init not in ("stored", "missing")]


@pytest.mark.parametrize("init", MADE)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32, DType.FLOAT64])
def test_initial_values_do_not_depend_on_the_layout(init, dtype):
    shape, region = (7, 5), ((2, 6), (1, 4))
    args = ARGS.get(init, ())
    everything = initialize(init, args, "w", 3, shape, whole(shape), dtype)
    part = initialize(init, args, "w", 3, shape, region, dtype)
    assert part.dtype == dtype.numpy
    np.testing.assert_array_equal(part, everything[region_index(region)])


def test_initial_values_are_what_they_say():
    shape = (200, 200)

    def make(init, *args):
        return initialize(init, args, "w", 3, shape, whole(shape), DType.FLOAT32)

    assert (make("zeros") == 0).all()
    assert (make("ones") == 1).all()
    assert (make("constant", 2.5) == 2.5).all()
    assert make("normal", 1.0, 0.5).mean() == pytest.approx(1, abs=0.02)
    assert make("normal", 1.0, 0.5).std() == pytest.approx(0.5, abs=0.02)
    assert -1 <= make("uniform", -1.0, 3.0).min() < -0.99
    assert 2.99 < make("uniform", -1.0, 3.0).max() <= 3
    other = initialize("normal", (1.0, 0.5), "b", 3, shape, whole(shape), DType.FLOAT32)
    assert (other != make("normal", 1.0, 0.5)).mean() > 0.99


@pytest.mark.parametrize(
    ("init", "args", "dtype", "error"),
    [
        ("xavier", (), DType.FLOAT32, AttributeValueError),
        ("normal", (0.0,), DType.FLOAT32, AttributeValueError),
        ("normal", (0.0, -1.0), DType.FLOAT32, AttributeValueError),
        ("uniform", (1.0, 0.0), DType.FLOAT32, AttributeValueError),
        ("constant", (float("nan"),), DType.FLOAT32, AttributeValueError),
        ("normal", (0.0, 1.0), DType.INT32, DTypeError),
        ("stored", (), DType.FLOAT32, AttributeValueError),
        ("missing", (), DType.FLOAT32, DataError),
    ],
)
def test_wrong_initialisers_are_refused(init, args, dtype, error):
    with pytest.raises(error):
        initialize(init, args, "w", 0, (2,), ((0, 2),), dtype)
