"""Data ops: what batches hold, that every layout sees the same, and broken files."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import AttributeValueError, DataError, DTypeError, UsageError
from plancompiler.ir import NdSbp
from plancompiler.ir.shard import rank_region, region_index, region_shape
from plancompiler.ops.registry import KernelContext, mesh_signatures, op_def
from tests.dense import run_dense

MESH = pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3], [4, 5]])
ROWS = 23


@pytest.fixture
def arrays(tmp_path):
    path = tmp_path / "rows.npz"
    x = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    np.savez(path, x=x, y=np.arange(ROWS, dtype=np.int64), short=np.zeros(5), empty=np.zeros(()))
    return path


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    return path


def batches(steps, seed=0, **outputs):
    """Outputs per step of a job whose body makes the values."""
    with pc.job("j", seed=seed) as job:
        for name, make in outputs.items():
            pc.output(name, make())
    return job, run_dense(job, steps)


def read(path, key="y", **config):
    return lambda: pc.data.Arrays(path, [key], placement=MESH, **config)[key]


def test_arrays_in_order_go_round(arrays):
    _, actual = batches(4, y=read(arrays, batch=10, shuffle=False))
    order = np.concatenate([step["y"] for step in actual])
    np.testing.assert_array_equal(order, np.arange(40) % ROWS)


def test_shuffled_epochs_hold_every_row_once_each_in_its_own_order(arrays):
    _, actual = batches(7, y=read(arrays, batch=10))
    epochs = np.concatenate([step["y"] for step in actual])[: 3 * ROWS].reshape(3, ROWS)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(ROWS))
        assert (epoch != np.arange(ROWS)).any()
    assert (epochs[0] != epochs[1]).any()


def test_a_batch_may_be_larger_than_the_data(arrays):
    _, actual = batches(1, y=read(arrays, batch=3 * ROWS))
    np.testing.assert_array_equal(np.bincount(actual[0]["y"]), np.full(ROWS, 3))


def test_arrays_of_one_file_agree_and_split_chooses_rows(arrays):
    def both():
        x, y = pc.data.Arrays(arrays, batch=6, split=(4, 20), placement=MESH)
        assert (x.shape, y.shape) == ((6, 4), (6,))
        pc.output("y", y)
        return x

    _, actual = batches(5, x=both)
    for step in actual:
        np.testing.assert_array_equal(step["x"][:, 0], 4 * step["y"])
        assert step["y"].min() >= 4
        assert step["y"].max() < 20


def test_the_order_follows_from_both_seeds(arrays):
    def order(job_seed, seed):
        return batches(2, seed=job_seed, y=read(arrays, batch=ROWS, seed=seed))[1][1]["y"].tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(*seeds)) for seeds in ((0, 0), (1, 0), (0, 1))}) == 3


def regions_agree(op, sbp, steps):
    """Each rank's own kernel gives its box of the whole batch."""
    value = op.outputs[0]

    def context(region):
        attrs = op_def(op.kind).complete(dict(op.attrs))
        return KernelContext(attrs, (), (value.shape,), (), (region,), seed=3)

    whole = context(tuple((0, extent) for extent in value.shape))
    ranks = {rank: context(rank_region(value.shape, GRID, sbp, rank)) for rank in GRID.rank_list}
    for step in steps:
        expected = np.empty(value.shape, value.dtype.numpy)
        whole.step = step
        op_def(op.kind).kernel(whole, [], [expected])
        for local in ranks.values():
            local.step = step
            region = local.output_regions[0]
            actual = np.empty(region_shape(region), value.dtype.numpy)
            op_def(op.kind).kernel(local, [], [actual])
            np.testing.assert_array_equal(actual, expected[region_index(region)])


@pytest.mark.parametrize("sbp", ["[S(0), B]", "[B, S(1)]", "[S(0), S(1)]", "[S(0), S(0)]"])
def test_every_layout_reads_its_part_of_the_same_batch(arrays, tokens, sbp):
    with pc.job("j") as job:
        x = pc.data.Arrays(arrays, ["x"], batch=5, placement=GRID, sbp=sbp)["x"]
        first, second = pc.data.TokenFile(tokens, 5, 7, "uint16", placement=GRID, sbp=sbp)
        constant = pc.constant(np.arange(35).reshape(5, 7), "int64", GRID, sbp)
        for name, value in (("x", x), ("first", first), ("second", second), ("c", constant)):
            pc.output(name, value)
    demanded = NdSbp.of(sbp)
    for op in job.ops[:4]:
        assert op.sbp == demanded
        signatures = mesh_signatures(op.kind, (), (op.outputs[0].type,), op.attrs, GRID.hierarchy)
        assert (demanded,) in [signature.outputs for signature in signatures]
        # Far along the run the sequence of epochs has started over several times.
        regions_agree(op, demanded, (0, 4, 4, 3, 1000))


def test_eager_batches_are_those_of_the_step_that_draws_are_of(arrays, tokens):
    def read_all():
        x, y = pc.data.Arrays(arrays, batch=5, placement=MESH, sbp="S(0)")
        return [x, y, *pc.data.TokenFile(tokens, 3, 7, "uint16", placement=MESH, sbp="S(0)")]

    def made_by_job():
        for number, value in enumerate(read_all()):
            pc.output(str(number), value)
        return pc.constant(0, "int64", MESH)

    _, steps = batches(8, seed=6, constant=made_by_job)

    def rank():
        generator = pc.manual_seed(6)
        compiled = pc.compile(read_all)
        optimizer, weight = pc.optim.SGD(lr=0.1), pc.nn.Parameter((2,)).place(MESH)
        # In any order, whatever steps an optimizer has made.
        for step in (0, 1, 2, 7, 3, 4):
            generator.start_step(step)
            optimizer.minimize((weight.value * weight.value).sum())
            for run in (read_all, compiled):
                for number, value in enumerate(run()):
                    np.testing.assert_array_equal(value.numpy(), steps[step][str(number)])
        assert len(compiled.programs()) == 1

    spawn(rank, 2)


def test_one_batch_again_and_again_is_warned_of_once(arrays, tokens, caplog):
    def read_all():
        x, y = pc.data.Arrays(arrays, batch=5, placement=MESH, sbp="S(0)")
        return [x, y, *pc.data.TokenFile(tokens, 3, 7, "uint16", placement=MESH, sbp="S(0)")]

    def rank(wrap, steps):
        generator = pc.manual_seed(6)
        read = wrap(read_all)
        for step in steps:
            if step is not None:
                generator.start_step(step)
            read()
        return [each.numpy() for each in read()], [each.numpy() for each in read()]

    for wrap in (lambda it: it, pc.compile):
        caplog.clear()
        for first, second in spawn(rank, 2, wrap, (0, 1, 1, 0)):
            for one, other in zip(first, second, strict=True):
                np.testing.assert_array_equal(one, other)
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("plancompiler.eager", "WARNING")
        assert "tests/frontend/test_data.py:" in record.getMessage()
        assert "the batch of step 0 again" in record.getMessage()
        assert "start_step(k) before step k" in record.getMessage()


def test_batches_of_chosen_steps_are_not_warned_of(arrays, caplog):
    def rank(wrap):
        generator = pc.manual_seed(6)

        def read():
            return list(pc.data.Arrays(arrays, batch=5, placement=MESH, sbp="S(0)"))

        run = wrap(read)
        for step in (0, 1, 1, 0):
            generator.start_step(step)
            run()
        generator.load_state(generator.state())
        run()
        with pc.using_generator(pc.Generator(6)):
            run()
        # Of the other rows of the file, which are other data.
        pc.data.Arrays(arrays, batch=5, split=(0, 6), placement=MESH)

    for wrap in (lambda it: it, pc.compile):
        spawn(rank, 2, wrap)
    assert not caplog.records


def test_more_ranks_than_rows_leaves_some_without(arrays):
    with pc.job("j") as job:
        y = pc.data.Arrays(arrays, ["y"], batch=2, placement=GRID, sbp="[S(0), S(0)]")["y"]
        pc.output("y", y)
    regions_agree(job.ops[0], NdSbp.of("[S(0), S(0)]"), (0, 1))


def test_targets_are_the_next_tokens(tokens):
    def both():
        first, second = pc.data.TokenFile(tokens, 8, 16, "uint16", placement=MESH)
        assert first.type == second.type
        pc.output("targets", second)
        return first

    _, actual = batches(3, tokens=both)
    for step in actual:
        assert step["tokens"].dtype == np.int64
        np.testing.assert_array_equal(step["targets"], step["tokens"] + 1)
        np.testing.assert_array_equal(np.diff(step["tokens"]), 1)
    begins = np.concatenate([step["tokens"][:, 0] for step in actual])
    assert len(set(begins)) > 20
    assert begins.max() < 1000 - 16


def test_a_file_that_just_fits_gives_its_only_sequence(tokens):
    _, actual = batches(
        1, t=lambda: pc.data.TokenFile(tokens, 2, 999, "uint16", placement=MESH).tokens
    )
    np.testing.assert_array_equal(actual[0]["t"], [np.arange(999)] * 2)


@pytest.mark.parametrize(
    ("part", "config"),
    [
        ("no array 'z'", {"keys": ["z"]}),
        ("has no rows", {"keys": ["empty"]}),
        ("different numbers of rows", {"keys": ["x", "short"]}),
        ("range of rows", {"split": (0, ROWS + 1)}),
        ("range of rows", {"split": (3, 3)}),
    ],
)
def test_arrays_that_are_not_in_the_file(arrays, part, config):
    with pytest.raises(DataError, match=part) as caught, pc.job("j"):
        pc.data.Arrays(arrays, placement=MESH, **config)
    assert "test_data.py" in caught.value.report.source


def test_files_that_cannot_be_read(tmp_path):
    noise, single, pickled = (tmp_path / name for name in ("noise.npz", "one.npy", "p.npz"))
    noise.write_bytes(b"PK\x03\x04 but nothing that follows")
    np.save(single, np.zeros(3))
    np.savez(pickled, x=np.array([{}], dtype=object))
    for path, part in (
        (tmp_path / "missing.npz", "cannot be read"),
        (noise, "no readable npz"),
        (single, "one array"),
        (pickled, "no readable npz"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(DataError, match=part), pc.job("j"):
            pc.data.Arrays(path, ["x"], placement=MESH)


@pytest.mark.parametrize("size", [0, 10, 999])
def test_token_files_that_are_too_short(tmp_path, size):
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(DataError, match="too short"), pc.job("j"):
        pc.data.TokenFile(path, 2, 512, "uint16", placement=MESH)


def test_files_may_be_on_the_workers_only(arrays, tokens, tmp_path):
    away = tmp_path / "away.npz"
    types = {"x": ((4,), "float32"), "y": ((), "int64")}
    with pytest.raises(DataError, match="cannot be read"), pc.job("j"):
        pc.data.Arrays(away, placement=MESH)
    for config in ({"types": types}, {"types": {"x": types["x"]}, "split": (0, 9)}):
        with pytest.raises(DataError, match="not here"), pc.job("j"):
            pc.data.Arrays(away, placement=MESH, **config)

    def job_reading(path, length=4, dtype="float32"):
        with pc.job("j") as job:
            given = {"x": ((length,), dtype), "y": ((), "int64")}
            x, y = pc.data.Arrays(
                path, batch=3, shuffle=False, placement=MESH, types=given, split=(20, ROWS)
            )
            pc.output("x", x)
            pc.output("y", y)
        return job

    waiting = [job_reading(away), job_reading(away, 5), job_reading(away, dtype="float64")]
    with pytest.raises(DataError, match="cannot be read"):
        run_dense(waiting[0], 1)
    away.write_bytes(arrays.read_bytes())
    assert run_dense(waiting[0], 1)[0]["y"].tolist() == [20, 21, 22]
    for job in waiting[1:]:
        with pytest.raises(DataError, match="not what the job says"):
            run_dense(job, 1)
    np.savez(away, x=np.zeros((4, 4), np.float32), y=np.zeros(4, np.int64))
    with pytest.raises(DataError, match="too short"):
        run_dense(waiting[0], 1)

    later = tmp_path / "later.bin"
    with pc.job("j") as job:
        pc.output("t", pc.data.TokenFile(later, 1, 4, "uint16", placement=MESH).tokens)
    with pytest.raises(DataError, match="cannot be read"):
        run_dense(job, 1)
    later.write_bytes(tokens.read_bytes())
    assert run_dense(job, 1)[0]["t"].shape == (1, 4)


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (UsageError, lambda a, t: pc.data.Arrays(a, [], placement=MESH)),
        (AttributeValueError, lambda a, t: pc.data.Arrays(a, batch=0, placement=MESH)),
        (AttributeValueError, lambda a, t: pc.data.Arrays(a, seed=-1, placement=MESH)),
        (AttributeValueError, lambda a, t: pc.data.TokenFile(t, 0, 4, placement=MESH)),
        (DTypeError, lambda a, t: pc.data.TokenFile(t, 1, 4, "float32", placement=MESH)),
    ],
)
def test_wrong_arguments(arrays, tokens, error, make):
    with pytest.raises(error), pc.job("j"):
        make(arrays, tokens)
