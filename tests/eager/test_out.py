"""`out=` of the public functions: the value of the plain call, in a tensor that stays itself."""

from __future__ import annotations

import inspect
from operator import attrgetter

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import GradientError, InplaceError, UsageError
from plancompiler.frontend.functions import DERIVED

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
TURNED = pc.Placement("cpu", [1, 0])


class Arguments:
    """Makes arguments, the same ones each time."""

    def __init__(self, placement, sbp):
        self.placement, self.sbp = placement, sbp
        self.random = np.random.default_rng(3)

    def tensor(self, value):
        value = np.asarray(value)
        return pc.tensor(value, self.placement, self.sbp if value.ndim else "B")

    def real(self, *shape):
        return self.tensor(self.random.normal(size=shape))

    def unit(self, *shape):
        return self.tensor(self.random.uniform(0.1, 0.9, shape))

    def matrix(self, size):
        return self.tensor(self.random.normal(size=(size, size)) + 4 * np.eye(size))

    def whole(self, high, *shape):
        return self.tensor(self.random.integers(0, high, shape))

    def truth(self, *shape):
        return self.tensor(self.random.random(shape) < 0.5)


def call(*args, **kwargs):
    return args, kwargs


def each(names, make):
    return dict.fromkeys(names.split(), make)


def made(**kwargs):
    """Of functions that make tensors: where, besides other arguments."""
    return lambda m: call(**kwargs, placement=m.placement, sbp=m.sbp)


CALLS = {
    **each(
        "abs exp neg square tanh sigmoid relu gelu sin cos tan sinh cosh atan asinh exp2 expm1 erf "
        "floor ceil round trunc sign isnan isinf isfinite nan_to_num zeros_like ones_like silu "
        "softplus logsigmoid mish elu selu leaky_relu hardtanh relu6 hardsigmoid hardswish "
        "softsign gelu_exact sum mean max min argmax argmin softmax log_softmax prod count_nonzero "
        "logsumexp var std norm cumsum cumprod cummax cummin sort argsort transpose squeeze "
        "flatten flip trace tril triu diag diagonal diag_embed stop_gradient all_reduce "
        "all_reduce_gradient all_gather reduce_scatter redistribute rotary_embedding "
        "clone empty_like median mode nanmax nanmean nanmedian "
        "nanmin nansum aminmax std_mean var_mean cov corrcoef logcumsumexp trapezoid "
        "cumulative_trapezoid histc histogram",
        lambda m: call(m.real(4, 6)),
    ),
    **dict.fromkeys(DERIVED, lambda m: call(m.unit(4, 6))),
    **each(
        "log sqrt rsqrt asin acos atanh log2 log10 log1p reciprocal", lambda m: call(m.unit(4, 6))
    ),
    **each("logical_not all any", lambda m: call(m.truth(4, 6))),
    **each(
        "add sub mul div maximum minimum less less_equal greater greater_equal equal not_equal "
        "logaddexp2 nextafter heaviside fmax fmin xlogy xlog1py "
        "atan2 hypot logaddexp copysign fmod remainder floor_divide swiglu mse_loss l1_loss "
        "smooth_l1_loss huber_loss bias_dropout_residual",
        lambda m: call(m.real(4, 6), m.unit(4, 6)),
    ),
    **each(
        "pow binary_cross_entropy binary_cross_entropy_with_logits kl_div",
        lambda m: call(m.unit(4, 6), m.unit(4, 6)),
    ),
    **each(
        "gcd lcm bitwise_and bitwise_or bitwise_xor shift_left shift_right",
        lambda m: call(m.whole(9, 4, 6), m.whole(5, 4, 6)),
    ),
    **each("logical_and logical_or logical_xor", lambda m: call(m.truth(4, 6), m.truth(4, 6))),
    **each("accuracy cross_entropy nll_loss", lambda m: call(m.real(4, 6), m.whole(6, 4))),
    **each(
        "c_softmax_with_cross_entropy margin_cross_entropy",
        lambda m: call(m.unit(4, 6), m.whole(6, 4), return_softmax=True),
    ),
    **each("concat stack global_norm found_inf is_finite_all", lambda m: call([m.real(4, 6)] * 2)),
    **each("global_avg_pool global_max_pool", lambda m: call(m.real(4, 2, 6, 6))),
    **each("batch_norm instance_norm batch_statistics", lambda m: call(m.real(4, 2, 6))),
    **each("dot inner outer", lambda m: call(m.real(6), m.real(6))),
    **each("adaptive_avg_pool1d", lambda m: call(m.real(4, 2, 6), 3)),
    **each("adaptive_avg_pool2d", lambda m: call(m.real(4, 2, 6, 6), 3)),
    **each("adaptive_avg_pool3d", lambda m: call(m.real(4, 2, 4, 4, 4), 2)),
    **each("avg_pool1d max_pool1d", lambda m: call(m.real(4, 2, 6), 2)),
    **each("avg_pool2d max_pool2d", lambda m: call(m.real(4, 2, 6, 6), 2)),
    **each("avg_pool3d max_pool3d", lambda m: call(m.real(4, 2, 4, 4, 4), 2)),
    **each("conv1d conv_transpose1d", lambda m: call(m.real(4, 2, 6), m.real(2, 2, 3))),
    **each("conv2d conv_transpose2d", lambda m: call(m.real(4, 2, 6, 6), m.real(2, 2, 3, 3))),
    **each("conv3d conv_transpose3d", lambda m: call(m.real(4, 2, 4, 4, 4), m.real(2, 2, 3, 3, 3))),
    **each("take_along_axis", lambda m: call(m.real(4, 6), m.whole(4, 4, 6), 0)),
    **each("gather", lambda m: call(m.real(4, 6), 0, m.whole(4, 4, 6))),
    **each("scatter scatter_add", lambda m: call(m.real(4, 6), 1, m.whole(6, 4, 1), m.real(4, 1))),
    **each("zeros ones", made(shape=(4, 6), dtype="float32")),
    **each("uniform normal bernoulli", made(shape=(4, 6), dtype="float32")),
    **each("logit", lambda m: call(m.unit(4, 6))),
    **each("addcmul addcdiv", lambda m: call(m.real(4, 6), m.real(4, 6), m.unit(4, 6))),
    **each("kron", lambda m: call(m.real(4, 6), m.real(2, 2))),
    **each("quantile nanquantile", lambda m: call(m.real(4, 6), 0.25, 1)),
    **each("put", lambda m: call(m.real(4, 6), m.whole(24, 4), m.real(4))),
    **each("tril_indices triu_indices", lambda m: call(3, placement=m.placement)),
    "addbmm": lambda m: call(m.real(4, 3), m.real(2, 4, 6), m.real(2, 6, 3)),
    "addmm": lambda m: call(m.real(4, 3), m.real(4, 6), m.real(6, 3)),
    "addmv": lambda m: call(m.real(4), m.real(4, 6), m.real(6)),
    "addr": lambda m: call(m.real(4, 6), m.real(4), m.real(6)),
    "baddbmm": lambda m: call(m.real(2, 4, 3), m.real(2, 4, 6), m.real(2, 6, 3)),
    "bucketize": lambda m: call(m.real(4, 6), m.tensor(np.arange(5.0))),
    "empty": lambda m: call(4, 6, placement=m.placement, sbp=m.sbp),
    "index_copy": lambda m: call(m.real(4, 6), m.tensor([3, 0]), m.real(2, 6)),
    "index_fill": lambda m: call(m.real(4, 6), m.tensor([3, 0]), 2.0),
    "index_reduce": lambda m: call(m.real(4, 6), m.tensor([3, 0]), m.real(2, 6), 0, "amax"),
    "kthvalue": lambda m: call(m.real(4, 6), 2),
    "logspace": made(start=0.0, stop=1.0, count=5),
    "masked_scatter": lambda m: call(m.real(4, 6), m.truth(4, 6), m.real(4, 6)),
    "multinomial": lambda m: call(m.unit(4, 6), 3),
    "scatter_reduce": lambda m: call(m.real(4, 6), 0, m.whole(4, 4, 6), m.real(4, 6), "mean"),
    "acosh": lambda m: call(m.tensor(np.linspace(1.5, 9, 24).reshape(4, 6))),
    "all_to_all": lambda m: call(m.real(4, 6), 1),
    "arange": made(start=0, stop=9, step=2),
    "bincount": lambda m: call(m.whole(5, 8), 5),
    "bitwise_not": lambda m: call(m.whole(9, 4, 6)),
    "bmm": lambda m: call(m.real(2, 4, 6), m.real(2, 6, 3)),
    "cached_attention": lambda m: call(
        *(m.real(2, 2, 3, 4) for _ in range(3)),
        (m.real(2, 2, 8, 4), m.real(2, 2, 8, 4)),
        m.tensor(2),
    ),
    "cast": lambda m: call(m.real(4, 6), "float32"),
    "causal_attention": lambda m: call(*(m.real(2, 5, 4) for _ in range(3))),
    "chunk": lambda m: call(m.real(4, 6), 4, axis=1),
    "class_center_rows": lambda m: call(m.real(8, 3), m.tensor([1, 3, 0, 2]), (2, 2)),
    "class_center_sample": lambda m: call(m.tensor([1, 6, 1, 3]), 8, 3, shards=2),
    "clip": lambda m: call(m.real(4, 6), -0.5, 0.5),
    "clip_by_global_norm": lambda m: call([m.real(4, 6), m.real(3)], 0.5),
    "constant": lambda m: call([[1, 2], [3, 4]], "float32", m.placement, m.sbp),
    "data_norm": lambda m: call(m.real(4, 6), *(m.unit(6) for _ in range(3))),
    "dropout": lambda m: call(m.real(4, 6), 0.5),
    "einsum": lambda m: call("ij,kj->ik", m.real(4, 6), m.real(3, 6)),
    "embedding": lambda m: call(m.real(8, 3), m.whole(8, 4)),
    "expand": lambda m: call(m.real(4, 1), (4, 6)),
    "eye": made(rows=4, columns=6),
    "full": made(shape=(4, 6), value=3.0, dtype="float32"),
    "full_like": lambda m: call(m.real(4, 6), 2.0),
    "fused_attention": lambda m: call(
        m.real(2, 3, 8), m.real(2, 3, 4, 8), m.real(2, 4, 8), dropout=0.5
    ),
    "exponential": made(shape=(4, 6)),
    "geometric": made(shape=(4, 6), p=0.5),
    "cauchy": made(shape=(4, 6)),
    "log_normal": made(shape=(4, 6)),
    "isclose": lambda m: call(m.real(4, 6), m.real(6), equal_nan=True),
    "rand_like": lambda m: call(m.real(4, 6)),
    "randn_like": lambda m: call(m.real(4, 6)),
    "randint_like": lambda m: call(m.real(4, 6), 0, 9),
    "rand": lambda m: call(4, 6, placement=m.placement, sbp=m.sbp),
    "randn": lambda m: call(4, 6, placement=m.placement, sbp=m.sbp),
    "fused_feedforward": lambda m: call(m.real(2, 3, 8), m.real(16, 8), m.real(8, 16)),
    "global_gather": lambda m: call(m.real(2, 2, 3, 5), m.tensor([[1, 2], [2, 1]]), 3),
    "global_scatter": lambda m: call(m.real(2, 3, 5), m.tensor([[1, 2], [2, 1]]), 3),
    "gather_rows": lambda m: call(m.real(2, 3, 5), m.tensor([[0, 4], [5, -1]])),
    "scatter_rows": lambda m: call(m.real(2, 2, 5), m.tensor([[0, 4], [5, -1]]), 2, 3),
    "grouped_matmul": lambda m: call(
        m.real(2, 3, 5), m.tensor([[1, 2], [0, 1]]), m.real(2, 2, 5, 4)
    ),
    "group_norm": lambda m: call(m.real(4, 6, 5), 2),
    "index_add": lambda m: call(m.real(4, 6), m.tensor([3, 0]), m.real(2, 6)),
    "index_select": lambda m: call(m.real(4, 6), m.tensor([3, 0])),
    "layer_norm": lambda m: call(m.real(4, 6), m.real(6), m.real(6)),
    "lerp": lambda m: call(m.real(4, 6), m.real(4, 6), 0.25),
    "linear": lambda m: call(m.real(4, 6), m.real(3, 6), m.real(3)),
    "linspace": made(start=0.0, stop=1.0, count=5),
    "masked_fill": lambda m: call(m.real(4, 6), m.truth(4, 6), 7.0),
    "matmul": lambda m: call(m.real(4, 6), m.real(3, 6), transpose_b=True),
    "one_hot": lambda m: call(m.whole(5, 4), 5),
    "pad": lambda m: call(m.real(4, 6), (1, 0), (0, 2), 7.0),
    "partial_all_gather": lambda m: call(m.real(4, 6)),
    "partial_recv": lambda m: call(m.real(4, 6), m.real(12), 2, 1),
    "partial_send": lambda m: call(m.real(4, 6), TURNED, 2, 1),
    "partial_transfer": lambda m: call(m.real(4, 6), TURNED),
    "permutation": made(count=9),
    "permute": lambda m: call(m.real(2, 4, 6), (2, 0, 1)),
    "put_along_axis": lambda m: call(m.real(4, 6), m.whole(6, 4, 1), m.real(4, 1), 1),
    "randint": made(shape=(4, 6), low=0, high=9),
    "repeat_interleave": lambda m: call(m.real(4, 6), 2, 0),
    "reshape": lambda m: call(m.real(4, 6), (8, 3)),
    "rms_norm": lambda m: call(m.real(4, 6), m.real(6)),
    "roll": lambda m: call(m.real(4, 6), 1, 0),
    "scaled_dot_product_attention": lambda m: call(
        *(m.real(2, 2, 5, 4) for _ in range(3)), dropout=0.5
    ),
    **each("zigzag unzigzag", lambda m: call(m.real(4, 6), 0, 2)),
    **each(
        "linalg.inv linalg.det linalg.slogdet linalg.logdet linalg.pinv linalg.qr linalg.svd "
        "linalg.svdvals linalg.lu_factor linalg.lu linalg.matrix_exp linalg.matrix_norm "
        "linalg.transposed linalg.diagonal linalg.trace linalg.norm linalg.vector_norm linalg.cond "
        "linalg.matrix_rank "
        "linalg.cholesky_inverse",
        lambda m: call(m.matrix(4)),
    ),
    **each(
        "linalg.cholesky linalg.eigh linalg.eigvalsh", lambda m: call(m.tensor(9 * np.eye(4) + 1))
    ),
    **each(
        "linalg.solve linalg.lstsq linalg.cholesky_solve linalg.vecdot",
        lambda m: call(m.matrix(4), m.matrix(4)),
    ),
    **each("linalg.cross", lambda m: call(m.real(4, 3), m.real(4, 3))),
    "linalg.householder_product": lambda m: call(m.real(4, 4), m.real(4)),
    "linalg.lu_solve": lambda m: call(
        m.matrix(4), m.tensor(np.array([2, 2, 3, 4], np.int32)), m.matrix(4)
    ),
    "linalg.matrix_power": lambda m: call(m.matrix(4), 3),
    "linalg.multi_dot": lambda m: call([m.real(4, 6), m.real(6, 2), m.real(2, 4)]),
    "linalg.solve_triangular": lambda m: call(m.matrix(4), m.real(4, 2), upper=True),
    "linalg.tensorinv": lambda m: call(m.tensor(np.eye(4).reshape(2, 2, 4) + 0.1), 2),
    "linalg.tensorsolve": lambda m: call(m.tensor(np.eye(4).reshape(2, 2, 4) + 0.1), m.real(2, 2)),
    "linalg.vander": lambda m: call(m.real(4), 3),
    **each(
        "atleast_1d atleast_2d atleast_3d ravel rot90 fliplr flipud diagflat",
        lambda m: call(m.real(4, 6)),
    ),
    **each("block_diag cat hstack vstack dstack column_stack", lambda m: call([m.real(4, 6)] * 2)),
    **each("hsplit vsplit tensor_split", lambda m: call(m.real(4, 6), 2)),
    "broadcast_tensors": lambda m: call(m.real(4, 6), m.real(6)),
    "broadcast_to": lambda m: call(m.real(4, 1), (4, 6)),
    "cartesian_prod": lambda m: call([m.real(4), m.real(2)]),
    "diagonal_scatter": lambda m: call(m.real(4, 6), m.real(4)),
    "dsplit": lambda m: call(m.real(4, 2, 6), 2),
    "movedim": lambda m: call(m.real(2, 4, 6), 0, 2),
    "narrow": lambda m: call(m.real(4, 6), 1, 2, 3),
    "select": lambda m: call(m.real(4, 6), 1, 2),
    "select_scatter": lambda m: call(m.real(4, 6), m.real(4), 1, 2),
    "slice_scatter": lambda m: call(m.real(4, 6), m.real(4, 2), 1, 1, 5, 2),
    "swapaxes": lambda m: call(m.real(4, 6), 0, 1),
    "unflatten": lambda m: call(m.real(4, 6), 1, (2, 3)),
    "unfold_axis": lambda m: call(m.real(4, 6), 1, 2, 2),
    "slice": lambda m: call(m.real(4, 6), (0, 1), (3, 5)),
    "split": lambda m: call(m.real(4, 6), (1, 2, 3), axis=1),
    "strided_slice": lambda m: call(m.real(4, 6), (0, 1), (4, 6), (2, 3)),
    "tensordot": lambda m: call(m.real(4, 6), m.real(6, 3), 1),
    "tile": lambda m: call(m.real(4, 6), (2, 1)),
    "topk": lambda m: call(m.real(4, 6), 3),
    "unbind": lambda m: call(m.real(4, 6), 1),
    "zeta": lambda m: call(m.tensor(np.linspace(1.5, 9, 24).reshape(4, 6)), m.unit(4, 6)),
    "unsqueeze": lambda m: call(m.real(4, 6), 0),
    "where": lambda m: call(m.truth(4, 6), m.real(4, 6), 1.0),
    **each("max_with_index min_with_index", lambda m: call(m.real(4, 6), 1)),
    "argwhere": lambda m: call(m.truth(4, 6), 30),
    "broadcast_arrays": lambda m: call(m.real(4, 1), m.real(6)),
    "diff": lambda m: call(m.real(4, 6)),
    "index_put": lambda m: call(m.real(4, 6), [0, 2], m.real(6)),
    "isin": lambda m: call(m.whole(9, 4, 6), m.whole(9, 3)),
    "masked_select": lambda m: call(m.real(4, 6), m.truth(4, 6), 30),
    "matrix_transpose": lambda m: call(m.real(4, 6)),
    "meshgrid": lambda m: call(m.real(4), m.real(6)),
    "moveaxis": lambda m: call(m.real(4, 6), 0, 1),
    "nonzero": lambda m: call(m.truth(4, 6), 30),
    "repeat": lambda m: call(m.real(4, 6), 2),
    "searchsorted": lambda m: call(m.tensor(np.arange(5.0)), m.real(4, 6)),
    "take": lambda m: call(m.real(4, 6), m.whole(4, 3)),
    "unique": lambda m: call(m.whole(9, 4, 6), 12),
}


def named(name):
    """A public function, that of a namespace too."""
    return attrgetter(name)(pc)


def with_out():
    names = [*pc.__all__, *(f"linalg.{each}" for each in pc.linalg.__all__)]
    return {
        name
        for name in names
        if inspect.isfunction(named(name)) and "out" in inspect.signature(named(name)).parameters
    }


def test_every_function_of_tensors_takes_out():
    assert set(CALLS) == with_out()
    without = {name for name in pc.__all__ if inspect.isfunction(named(name))} - with_out()
    assert {name for name in without if not name.endswith("_update")} == {
        "allclose",
        "array_equal",
        "as_job",
        "checkpoint",
        "collective_stream",
        "comm_trace",
        "compile",
        "default_generator",
        "from_local",
        "forecast",
        "from_onnx",
        "from_jax",
        "from_torch",
        "gradients",
        "detect_anomaly",
        "implicit_broadcast",
        "init",
        "input",
        "job",
        "load_weights",
        "manual_seed",
        "no_grad",
        "onnx_rule",
        "op",
        "output",
        "profile",
        "read_plans",
        "run",
        "expert_places",
        "stage",
        "strict_dtypes",
        "tensor",
        "stablehlo_rule",
        "torch_rule",
        "using_generator",
    }


def empty_like(results):
    """Tensors that can take these results; None for what is no tensor."""
    if isinstance(results, (list, tuple)):
        return [empty_like(one) for one in results]
    if not isinstance(results, pc.DistTensor):
        return None
    return pc.tensor(np.full(results.shape, 3, results.local.dtype), results.placement, results.sbp)


def leaves(*trees):
    """Corresponding elements of trees of one form."""
    if isinstance(trees[0], (list, tuple)):
        return [leaf for branches in zip(*trees, strict=True) for leaf in leaves(*branches)]
    return [trees]


@pytest.mark.slow
@pytest.mark.parametrize("sbp", ["B", "S(0)"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_value_is_that_of_the_plain_call(name, sbp):
    function = named(name)

    def rank():
        pc.manual_seed(4)
        args, kwargs = CALLS[name](Arguments(PAIR, sbp))
        plain = function(*args, **kwargs)
        out = empty_like(plain)
        pc.manual_seed(4)
        args, kwargs = CALLS[name](Arguments(PAIR, sbp))
        results = function(*args, **kwargs, out=out)
        whole = all(taken is not None for (taken,) in leaves(out))
        assert results is out if whole else type(results) is type(plain)
        count = 0
        for taken, got, wanted in leaves(out, results, plain):
            if taken is None:
                assert got == wanted
                continue
            count += 1
            assert got is taken
            assert got.spec is wanted.spec
            np.testing.assert_array_equal(got.local, wanted.local)
        return count

    assert spawn(rank, 2)[0] >= 1


# --- what is refused ------------------------------------------------------------------------------


def test_out_keeps_shape_dtype_and_placement():
    def rank():
        x = pc.tensor(np.arange(24.0).reshape(4, 6), PAIR, "S(0)")
        refused = [
            (pc.add, (x, x), pc.tensor(np.zeros((2, 4, 6)), PAIR, "S(1)")),
            (pc.relu, (x,), pc.tensor(np.zeros((4, 6), np.float32), PAIR, "S(0)")),
            (pc.relu, (x,), pc.tensor(np.zeros((4, 6)), TURNED, "S(0)")),
            (pc.sum, (x,), pc.tensor(np.zeros(1), PAIR)),
        ]
        for function, args, out in refused:
            before = out.local.copy()
            with pytest.raises(InplaceError, match="shape, dtype or placement") as raised:
                function(*args, out=out)
            assert raised.value.report.expected == str(out.spec)
            assert "test_out.py" in raised.value.report.source
            np.testing.assert_array_equal(out.local, before)

    spawn(rank, 2)


def test_no_tensor_has_changed_where_one_is_refused():
    x = pc.tensor(np.array([3.0, 1.0, 2.0]), ALONE)
    values = pc.tensor(np.zeros(3), ALONE)
    wide = pc.expand(pc.tensor(np.zeros((1, 3)), ALONE), (2, 3))
    for out in (
        (values, pc.tensor(np.zeros(3), ALONE)),
        (values, pc.tensor(np.zeros(2, np.int64), ALONE)),
    ):
        with pytest.raises(InplaceError, match="shape, dtype or placement"):
            pc.sort(x, out=out)
        assert values.numpy().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(InplaceError, match="elements share memory"):
        pc.add(wide, 1.0, out=wide)
    with pytest.raises(InplaceError, match="elements share memory"):
        pc.split(pc.tensor(np.ones((5, 3)), ALONE), (1, 2, 2), out=[None, wide * 0.0, wide])


@pytest.mark.parametrize("out", [np.zeros(3), 3.0, (), [None, None], "y"])
def test_out_that_is_no_tensor(out):
    x = pc.tensor(np.ones(3), ALONE)
    with pytest.raises(UsageError, match="relu puts its results into eager tensors only"):
        pc.relu(x, out=out)


def test_results_and_tensors_pair_up():
    x = pc.tensor(np.array([3.0, 1.0, 2.0]), ALONE)
    y = pc.tensor(np.zeros(3), ALONE)
    for use in (
        lambda: pc.relu(x, out=[y]),
        lambda: pc.sort(x, out=y),
        lambda: pc.sort(x, out=[y]),
        lambda: pc.split(x, 1, out=[x, x]),
        lambda: pc.sort(x, out=[y, y]),
        lambda: pc.sort(x, out=[y, 0.0]),
        lambda: pc.class_center_sample(x.cast("int64"), 4, 2, out=[None, None, y]),
    ):
        with pytest.raises(UsageError, match=r"do not pair up|a tensor of its own"):
            use()
    assert y.numpy().tolist() == [0.0, 0.0, 0.0]
    assert pc.relu(x, out=None).numpy().tolist() == [3.0, 1.0, 2.0]


def test_values_of_a_job_have_no_memory():
    y = pc.tensor(np.zeros(3), ALONE)
    with pc.job("j"):
        x = pc.input("x", (3,), "float64", ALONE)
        for out in (x, y):
            with pytest.raises(UsageError, match="values of a job have no memory") as raised:
                pc.add(x, x, out=out)
            assert "test_out.py" in raised.value.report.source
            assert "y = pc.add(...)" in raised.value.report.hint
        pc.output("y", pc.add(x, x, out=None), finite=False)
    with pytest.raises(UsageError, match="into eager tensors only"):
        pc.add(y, y, out=x)


# --- the tape -------------------------------------------------------------------------------------


def gradient(function):
    x = pc.tensor(np.array([1.0, 2.0, 3.0]), ALONE, requires_grad=True)
    function(x).sum().backward()
    return x.grad.numpy().tolist()


def plain(*values):
    return pc.tensor(np.array(values), ALONE)


def test_results_are_recorded():
    def function(x):
        y = plain(0.0, 0.0, 0.0)
        assert pc.mul(x, x, out=y) is y
        return y * 2.0

    assert gradient(function) == [4.0, 8.0, 12.0]


def test_a_tensor_may_take_what_is_made_of_it():
    def sum_of_both(x):
        y = x * 2.0
        kept = y
        assert pc.mul(y, x, out=y) is y is kept
        return y

    def off_the_tape(x):
        y = plain(5.0, 6.0, 7.0)
        return pc.mul(y, x, out=y)

    def moved(x):
        y = x * x
        pc.roll(y, -1, 0, out=y)
        return y * plain(1.0, 2.0, 3.0)

    def of_itself_alone(x):
        y = x * 3.0
        pc.redistribute(y, out=y)
        return y

    def several(x):
        y, places = x * 2.0, pc.tensor(np.zeros(3, np.int64), ALONE)
        pc.sort(y, descending=True, out=[y, places])
        return y * plain(1.0, 10.0, 100.0)

    def used_before(x):
        y, z = x * 2.0, x * 3.0
        pc.split(pc.concat([z, y]), 3, out=[y, z])
        return y + z

    assert gradient(sum_of_both) == [4.0, 8.0, 12.0]
    assert gradient(off_the_tape) == [5.0, 6.0, 7.0]
    assert gradient(moved) == [6.0, 4.0, 12.0]
    assert gradient(of_itself_alone) == [3.0, 3.0, 3.0]
    assert gradient(several) == [200.0, 20.0, 2.0]
    with pytest.raises(GradientError, match="changed in place after it was used"):
        gradient(used_before)


def test_the_tape_refuses_what_it_could_not_walk_back():
    w = pc.tensor(np.ones(3), ALONE, requires_grad=True)
    with pytest.raises(InplaceError, match="on the tape cannot be changed"):
        pc.add(w, w, out=w)
    base = plain(0.0, 0.0, 0.0)
    view = base[:2]
    with pytest.raises(InplaceError, match="would not be part of the gradient"):
        pc.add(w, w, out=base)
    y = w * 2.0
    used = y * y
    pc.add(y, 1.0, out=y)
    with pytest.raises(GradientError, match="changed in place"):
        used.sum().backward()
    with pc.no_grad():
        assert pc.add(w, w, out=w) is w
        pc.add(w, w, out=base)
    assert w.numpy().tolist() == [2.0, 2.0, 2.0]
    assert view.numpy().tolist() == [4.0, 4.0]


def test_memory_is_not_shared_with_an_argument():
    x = plain(1.0, 2.0, 3.0)
    for y in (plain(0.0, 0.0, 0.0), pc.tensor(np.ones(3), ALONE, requires_grad=True) * 2.0):
        pc.cast(x, "float64", out=y)  # which is x itself
        y += 1.0
        assert x.numpy().tolist() == [1.0, 2.0, 3.0]
        assert y.numpy().tolist() == [2.0, 3.0, 4.0]


def test_results_that_lie_in_each_others_tensors():
    x = plain(1.0, 2.0, 3.0, 4.0)
    pc.split(x, 2, out=[x[2:], x[:2]])
    assert x.numpy().tolist() == [3.0, 4.0, 1.0, 2.0]
    square = pc.tensor(np.arange(9.0).reshape(3, 3), ALONE)
    assert pc.transpose(square, out=square) is square
    np.testing.assert_array_equal(square.numpy(), np.arange(9.0).reshape(3, 3).T)


# --- compiled, and users' own functions -----------------------------------------------------------


def test_out_in_compiled_functions():
    def function(x, y, pair):
        pc.dropout(x, 0.5, out=y)
        pc.mul(y, x, out=y)
        kept = pc.sort(y * 2.0, out=pair)
        inner = x * 3.0
        assert pc.matmul(inner, x, transpose_b=True, out=inner) is inner
        return kept[0] + inner

    def rank(wrap):
        pc.manual_seed(9)
        run = wrap(function)
        arrays = []
        for step in range(2):
            pc.default_generator().start_step(step)
            x = pc.tensor(np.arange(16.0).reshape(4, 4) % 7 - step, PAIR, "B")
            y = pc.tensor(np.zeros((4, 4)), PAIR, "B")
            pair = (pc.tensor(np.zeros((4, 4)), PAIR), pc.tensor(np.zeros((4, 4), np.int64), PAIR))
            made = run(x, y, pair)
            arrays += [each.numpy() for each in (made, x, y, *pair)]
        return arrays

    eager = spawn(lambda: rank(lambda it: it), 2)
    compiled = spawn(lambda: rank(pc.compile), 2)
    for ours, wanted in zip(compiled, eager, strict=True):
        for got, expected in zip(ours, wanted, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_gradients_in_compiled_functions():
    def function(x):
        y = x * 2.0
        pc.mul(y, x, out=y)
        places = pc.cast(x.detach(), "int64")
        pc.sort(y, descending=True, out=[y, places])
        (y * x.detach() + places.cast("float64")).sum().backward()
        return y.detach()

    def gradients(wrap):
        x = pc.tensor(np.array([1.0, 2.0, 3.0]), ALONE, requires_grad=True)
        return wrap(function)(x).numpy().tolist(), x.grad.numpy().tolist()

    assert gradients(lambda it: it) == ([18.0, 8.0, 2.0], [12.0, 16.0, 12.0])
    assert gradients(pc.compile) == gradients(lambda it: it)


def test_into_serves_functions_of_users():
    def both(x, scale=1.0):
        return {"unused": x} if scale is None else [x * scale, (x + y, None)]

    y, z = plain(1.0, 1.0), plain(0.0, 0.0)
    taken = pc.eager.into([y, (z, None)], both, plain(2.0, 3.0), scale=10.0)
    assert (y.numpy().tolist(), z.numpy().tolist()) == ([20.0, 30.0], [3.0, 4.0])
    assert taken[0] is y
    assert taken[1][0] is z
    with pytest.raises(UsageError, match="the results of both do not pair up"):
        pc.eager.into([y, z], both, y, scale=None)
    with pytest.raises(UsageError, match="a tensor of its own"):
        pc.eager.into(None, both, y)
    x = pc.tensor(np.ones(2), ALONE, requires_grad=True)
    inner = x * 2.0
    pc.eager.into(inner, lambda: inner * inner)  # which names the tensor itself
    inner.sum().backward()
    assert x.grad.numpy().tolist() == [8.0, 8.0]


def test_help_and_signatures_tell_of_out():
    for name in sorted(CALLS):
        function = named(name)
        parameter = inspect.signature(function).parameters["out"]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default is None
        assert "With `out` the result is put into" in inspect.getdoc(function)
        assert function.__name__ == name.rpartition(".")[2]


def test_a_view_among_several_results_is_written_into_its_base():
    base, other, x = (pc.tensor(np.zeros(n, np.float32), ALONE) for n in (4, 2, 2))
    view = base[1:3]
    with pc.no_grad():
        pc.eager.into([view, other], lambda: (x + 1.0, x + 2.0))
    np.testing.assert_array_equal(view.numpy(), [1.0, 1.0])
    np.testing.assert_array_equal(base.numpy(), [0.0, 1.0, 1.0, 0.0])
    np.testing.assert_array_equal(other.numpy(), [2.0, 2.0])
