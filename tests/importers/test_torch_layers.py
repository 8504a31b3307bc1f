"""Functions and layers with PyTorch's names beside PyTorch's own: results, and gradients by all
inputs and parameters; and PyTorch's layers imported."""

from __future__ import annotations

import math

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from tests.importers.models import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PAIR = pc.Placement("cpu", [0, 1])
RANDOM = np.random.default_rng(3)
LOGS = RANDOM.normal(size=(6, 3, 4))
LOGS -= np.log(np.exp(LOGS).sum(-1, keepdims=True))


def real(*shape):
    return RANDOM.normal(size=shape)


def unit(*shape):
    return RANDOM.uniform(0.1, 0.9, shape)


def whole(high, *shape):
    return RANDOM.integers(0, high, shape)


def signs(*shape):
    return np.where(RANDOM.random(shape) < 0.5, 1.0, -1.0)


# --- functions ------------------------------------------------------------------------------------


def calls():
    """Name, arguments and keywords of each call."""
    cases = []

    def call(name, *args, **named):
        cases.append((name, args, named))

    labels = whole(5, 4)
    labels[1] = -100
    for reduction in ("mean", "none"):
        how = {"reduction": reduction}
        for smooth in (0.0, 0.2):
            more = {"label_smoothing": smooth, **how}
            call("cross_entropy", real(4, 5), labels, weight=unit(5), **more)
            call("cross_entropy", real(4, 5, 3), whole(5, 4, 3), ignore_index=2, **more)
            call("cross_entropy", real(4, 5, 2), unit(4, 5, 2), weight=unit(5), **more)
        call("nll_loss", real(4, 5, 2), whole(5, 4, 2), weight=unit(5), ignore_index=1, **how)
        call("binary_cross_entropy", unit(4, 3), unit(4, 3), weight=unit(4, 3), **how)
        chances = {"weight": unit(3), "pos_weight": unit(3) * 3}
        call("binary_cross_entropy_with_logits", real(4, 3), unit(4, 3), **chances, **how)
        call("kl_div", real(4, 3), unit(4, 3), log_target=True, **how)
        call("smooth_l1_loss", real(4, 3), real(4, 3), beta=0.5, **how)
        call("soft_margin_loss", real(4, 3), signs(4, 3), **how)
        call("hinge_embedding_loss", real(4, 3), signs(4, 3), margin=0.7, **how)
        call("margin_ranking_loss", real(4), real(4), signs(4), margin=0.2, **how)
        call("cosine_embedding_loss", real(4, 3), real(4, 3), signs(4), margin=0.1, **how)
        call("triplet_margin_loss", real(4, 3), real(4, 3), real(4, 3), swap=True, **how)
        call("multi_margin_loss", real(4, 5), whole(5, 4), p=2, weight=unit(5), **how)
        named = np.array([[3, 0, -1, 1], [1, -1, -1, -1], [-1, 0, 1, 2]])
        call("multilabel_margin_loss", real(3, 4), named, **how)
        call("multilabel_soft_margin_loss", real(3, 4), unit(3, 4), weight=unit(4), **how)
        call("poisson_nll_loss", unit(4, 3), 3 * unit(4, 3) + 0.2, full=True, **how)
        call("gaussian_nll_loss", real(4, 3), real(4, 3), unit(4, 1), full=True, **how)
        sizes = np.array([6, 5, 4]), np.array([2, 1, 2])
        call("ctc_loss", LOGS, whole(3, 3, 2) + 1, *sizes, **how)
        call("ctc_loss", LOGS, whole(3, 5) + 1, *sizes, **how)
    for name in (
        *("selu", "mish", "hardsigmoid", "hardswish", "gelu", "elu", "celu", "hardtanh", "rrelu"),
        *("hardshrink", "softshrink", "tanhshrink", "softplus", "glu", "logsigmoid", "softsign"),
    ):
        call(name, 3 * real(4, 6))
    call("prelu", real(4, 3, 2), unit(3))
    call("threshold", real(4, 3), 0.1, 20.0)
    call("cosine_similarity", real(4, 3, 2), real(4, 3, 2))
    call("normalize", real(4, 3), p=1.0, dim=0)
    call("layer_norm", real(4, 3, 2), (3, 2), real(3, 2), real(3, 2))
    call("rms_norm", real(4, 3, 2), (3, 2), real(3, 2))
    call("local_response_norm", real(2, 6, 4, 3), 3, alpha=0.3)
    for ceil_mode in (False, True):
        for axes, space in ((1, (9,)), (2, (7, 8)), (3, (5, 6, 4))):
            how = {"stride": 2, "ceil_mode": ceil_mode}
            call(f"max_pool{axes}d", real(2, 2, *space), 3, padding=1, **how)
            call(f"avg_pool{axes}d", real(2, 2, *space), 3, padding=1, **how)
            call(f"lp_pool{axes}d", unit(2, 2, *space), 2.0, 2, **how)
    for axes, space in ((1, (7,)), (2, (7, 8)), (3, (5, 6, 4))):
        call(f"adaptive_max_pool{axes}d", real(2, 3, *space), 3)
    for mode in ("reflect", "replicate", "circular", "constant"):
        call("pad", real(2, 3, 6, 5), (2, 1, 0, 3), mode=mode)
        call("pad", real(2, 3, 6, 5), (-1, 1, 1, -2), mode=mode)
    call("unfold", real(2, 3, 7, 8), 2, 1, (1, 0), 2)
    call("fold", real(2, 12, 12), (5, 6), 2, stride=2, padding=1)
    call("pixel_shuffle", real(2, 12, 3, 4), 2)
    call("pixel_unshuffle", real(2, 3, 4, 6), 2)
    for mode, shape in (
        *((mode, (2, 3, 7)) for mode in ("nearest", "linear")),
        *((mode, (2, 3, 7, 6)) for mode in ("nearest-exact", "bilinear", "bicubic", "area")),
        ("trilinear", (2, 2, 4, 5, 3)),
    ):
        for how in ({"scale_factor": 1.7}, {"scale_factor": 0.6}, {"size": (11, 4, 7)}):
            if "size" in how:
                how = {"size": how["size"][: len(shape) - 2]}
            call("interpolate", real(*shape), mode=mode, **how)
            if mode in ("linear", "bilinear", "trilinear", "bicubic"):
                call("interpolate", real(*shape), mode=mode, align_corners=True, **how)
            if mode in ("bilinear", "bicubic"):
                call("interpolate", real(*shape), mode=mode, antialias=True, **how)
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding_mode in ("zeros", "border", "reflection"):
            how = {"mode": mode, "padding_mode": padding_mode, "align_corners": mode != "nearest"}
            call("grid_sample", real(2, 3, 5, 6), 3 * unit(2, 4, 3, 2) - 1.5, **how)
    call("grid_sample", real(2, 3, 5, 6, 4), 3 * unit(2, 4, 3, 2, 3) - 1.5, align_corners=False)
    call("affine_grid", real(2, 3, 4), [2, 3, 4, 5, 3], align_corners=False)
    call("bilinear", real(4, 3), real(4, 2), real(5, 3, 2), real(5))
    call("embedding", whole(5, 4), real(5, 3), padding_idx=2)
    for mode in ("sum", "mean", "max"):
        call("embedding_bag", whole(5, 4, 3), real(5, 3), mode=mode, padding_idx=2)
    call("embedding_bag", whole(5, 7), real(5, 3), np.array([0, 2, 2, 5]))
    call("conv_transpose2d", real(2, 4, 5, 6), real(4, 3, 2, 2), real(6), 3, 1, 1, 2, 2)
    queries = real(2, 3, 5, 4), real(2, 3, 6, 4), real(2, 3, 6, 2)
    call("scaled_dot_product_attention", *queries, attn_mask=real(5, 6))
    return cases


def mapped(value, make):
    return make(value) if isinstance(value, np.ndarray) else value


def weights(shape):
    return np.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape)


def by_torch(name, args, named, only_first=False):
    leaves = []

    def tensor(array):
        made = torch.tensor(array)
        if made.is_floating_point() and not (only_first and leaves):
            leaves.append(made.requires_grad_())
        return made

    given = [mapped(each, tensor) for each in args]
    made = getattr(torch.nn.functional, name)(
        *given, **{key: mapped(each, tensor) for key, each in named.items()}
    )
    (made * torch.tensor(weights(made.shape))).sum().backward()
    grads = [np.zeros(each.shape) if each.grad is None else each.grad.numpy() for each in leaves]
    return made.detach().numpy(), grads


def by_us(name, args, named, axis, count):
    leaves = []

    def tensor(array):
        sbp = f"S({min(axis, array.ndim - 1)})" if axis is not None and array.ndim else "B"
        made = pc.tensor(array, PAIR, sbp)
        if made.dtype.is_floating and len(leaves) < count:
            made.requires_grad = True
            leaves.append(made)
        return made

    given = [mapped(each, tensor) for each in args]
    made = getattr(pc.nn.functional, name)(
        *given, **{key: mapped(each, tensor) for key, each in named.items()}
    )
    (made * pc.tensor(weights(made.shape), PAIR, "B")).sum().backward()
    grads = [np.zeros(each.shape) if each.grad is None else each.grad.numpy() for each in leaves]
    return made.numpy(), grads


def test_functions():
    cases = []
    for name, args, named in calls():
        try:
            made = by_torch(name, args, named)
        except RuntimeError:  # PyTorch does not differentiate by some targets and weights
            made = by_torch(name, args, named, only_first=True)
        cases.append((name, args, named, *made))

    def rank(axis):
        for number, (name, args, named, value, grads) in enumerate(cases):
            ours, slopes = by_us(name, args, named, axis, len(grads))
            np.testing.assert_allclose(ours, value, 1e-9, 1e-9, err_msg=f"{number} {name} {named}")
            if name == "ctc_loss":  # PyTorch's counts on log_softmax before it
                continue
            for slope, grad in zip(slopes, grads, strict=True):
                np.testing.assert_allclose(
                    slope, grad, 1e-8, 1e-8, err_msg=f"{number} {name} {named}"
                )

    for axis in (None, 0, 2):
        spawn(rank, 2, axis)


# --- layers ---------------------------------------------------------------------------------------

X, MEMORY = real(5, 2, 8), real(6, 2, 8)
HIDDEN = np.triu(np.ones((5, 5), bool), 1)
# Name, options, inputs, and keywords of the call.
LAYERS = [
    *(
        (name, {"input_size": 3, "hidden_size": 4, **how}, (real(5, 2, 3),), {})
        for name in ("LSTM", "GRU", "RNN")
        for how in ({"bias": False}, {"num_layers": 2, "bidirectional": True, "batch_first": True})
    ),
    ("LSTM", {"input_size": 3, "hidden_size": 4, "proj_size": 2}, (real(5, 2, 3),), {}),
    *(
        (f"{name}Cell", {"input_size": 3, "hidden_size": 4}, (real(2, 3),), {})
        for name in ("LSTM", "GRU", "RNN")
    ),
    ("MultiheadAttention", {"embed_dim": 8, "num_heads": 2}, (X, MEMORY, MEMORY), {}),
    (
        "MultiheadAttention",
        {
            "embed_dim": 8,
            "num_heads": 2,
            "kdim": 3,
            "vdim": 5,
            "add_bias_kv": True,
            "add_zero_attn": True,
        },
        (X, real(6, 2, 3), real(6, 2, 5)),
        {"need_weights": False},
    ),
    (
        "TransformerEncoderLayer",
        {"d_model": 8, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0},
        (X,),
        {"src_mask": HIDDEN},
    ),
    (
        "TransformerDecoderLayer",
        {
            "d_model": 8,
            "nhead": 2,
            "dim_feedforward": 6,
            "dropout": 0.0,
            "norm_first": True,
            "activation": "gelu",
        },
        (X, MEMORY),
        {"tgt_mask": HIDDEN},
    ),
    (
        "Transformer",
        {
            "d_model": 8,
            "nhead": 2,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "dim_feedforward": 6,
            "dropout": 0.0,
        },
        (X, MEMORY),
        {},
    ),
    (
        "Conv2d",
        {
            "in_channels": 4,
            "out_channels": 6,
            "kernel_size": 3,
            "padding": 1,
            "padding_mode": "reflect",
            "groups": 2,
        },
        (real(2, 4, 5, 6),),
        {},
    ),
    (
        "ConvTranspose1d",
        {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "groups": 2},
        (real(2, 4, 5),),
        {},
    ),
    ("BatchNorm3d", {"num_features": 3}, (real(4, 3, 2, 3, 2),), {}),
    ("InstanceNorm2d", {"num_features": 3, "affine": True}, (real(4, 3, 2, 3),), {}),
    ("LayerNorm", {"normalized_shape": (3, 2), "bias": False}, (real(4, 3, 2),), {}),
    ("EmbeddingBag", {"num_embeddings": 5, "embedding_dim": 3}, (whole(5, 4, 2),), {}),
    ("PReLU", {"num_parameters": 3}, (real(4, 3, 2),), {}),
    (
        "Bilinear",
        {"in1_features": 3, "in2_features": 2, "out_features": 4},
        (real(5, 3), real(5, 2)),
        {},
    ),
]


def flat(tree):
    if isinstance(tree, (tuple, list)):
        return [leaf for each in tree for leaf in flat(each)]
    return [] if tree is None else [tree]


def torch_layer(name, options):
    torch.manual_seed(1)
    module = getattr(torch.nn, name)(**options).double()
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("number", range(len(LAYERS)), ids=[each[0] for each in LAYERS])
def test_layers(number):
    name, options, inputs, named = LAYERS[number]
    theirs = torch_layer(name, options)
    # Before the call, which changes running statistics.
    state = {
        key: each.numpy().copy()
        for key, each in theirs.state_dict().items()
        if "num_batches" not in key
    }
    given = [torch.tensor(each) for each in inputs]
    for each in given:
        each.requires_grad = each.is_floating_point()
    expected = flat(
        theirs(*given, **{key: mapped(each, torch.tensor) for key, each in named.items()})
    )
    sum((each * torch.tensor(weights(each.shape))).sum() for each in expected).backward()

    def rank():
        module = getattr(pc.nn, name)(**options, dtype="float64").place(PAIR)
        assert list(state) == [key for key, _ in module.named_parameters()]
        module.load_state_dict({key: pc.tensor(each, PAIR, "B") for key, each in state.items()})
        ours = [pc.tensor(each, PAIR, "S(1)") for each in inputs]
        for each in ours:
            each.requires_grad = each.dtype.is_floating
        made = flat(
            module(
                *ours,
                **{
                    key: pc.tensor(each, PAIR, "B") if isinstance(each, np.ndarray) else each
                    for key, each in named.items()
                },
            )
        )
        for one, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(one.numpy(), other.detach().numpy(), 1e-9, 1e-9)
        total = sum((each * pc.tensor(weights(each.shape), PAIR, "B")).sum() for each in made)
        total.backward()
        for one, other in zip(ours, given, strict=True):
            if other.grad is not None:
                np.testing.assert_allclose(one.grad.numpy(), other.grad.numpy(), 1e-8, 1e-8)
        mine = dict(module.named_parameters())
        for key, parameter in theirs.named_parameters():
            grad = mine[key].value.grad
            if parameter.grad is not None and grad is not None:
                np.testing.assert_allclose(grad.numpy(), parameter.grad.numpy(), 1e-8, 1e-8, key)
            else:
                assert not (parameter.grad if grad is None else torch.tensor(grad.numpy())).any()
        for key, buffer in theirs.named_buffers():
            if key in mine:
                np.testing.assert_allclose(mine[key].value.numpy(), buffer.numpy(), 1e-9)

    spawn(rank, 2)


# --- imported -------------------------------------------------------------------------------------


class Many(torch.nn.Module):
    """Layers in one module, each with its own input, so that they are exported at once."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, *inputs):
        made = []
        for layer, given in zip(self.layers, inputs, strict=True):
            made += flat(layer(*given) if isinstance(given, (tuple, list)) else layer(given))
        return tuple(made)


class Diagonals(torch.nn.Module):
    """Along the axes that PyTorch takes, and along others."""

    def forward(self, x):
        return x.diagonal(), x.diagonal(1, 2, -1)


def imported_layers():
    nn = torch.nn
    image = real(2, 4, 6, 7)
    labels = np.array([1, 0, 4, 2])
    pairs = [
        (nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), real(2, 5, 3)),
        (nn.LSTM(3, 4, bias=False, proj_size=2), real(5, 2, 3)),
        (nn.GRU(3, 4, bias=False), real(5, 2, 3)),
        (nn.RNN(3, 4, nonlinearity="relu"), real(5, 2, 3)),
        (nn.LSTMCell(3, 4), real(2, 3)),
        (nn.GRUCell(3, 4), real(2, 3)),
        (nn.MultiheadAttention(8, 2), (X, MEMORY, MEMORY)),
        (nn.TransformerEncoderLayer(8, 2, 6, 0.0), X),
        (nn.EmbeddingBag(5, 3), whole(5, 4, 2)),
        (nn.Bilinear(3, 2, 4), (real(5, 3), real(5, 2))),
        (nn.PReLU(4), image),
        (Diagonals(), image),
        (nn.CELU(0.5), image),
        (nn.MaxPool2d(2, ceil_mode=True), image),
        (nn.AvgPool2d(3, divisor_override=2), image),
        (nn.AvgPool2d(40, ceil_mode=True), image),
        (nn.AvgPool2d((40, 2), padding=(1, 0), ceil_mode=True, count_include_pad=False), image),
        (nn.AvgPool2d(40, padding=2, ceil_mode=True), image),
        (nn.MaxPool2d((40, 3), padding=(1, 0), ceil_mode=True), image),
        (nn.AdaptiveMaxPool2d(3), image),
        (nn.ReflectionPad2d(1), image),
        (nn.CircularPad2d((1, 0, 2, 1)), image),
        (nn.InstanceNorm2d(4, affine=True), image),
        (nn.Upsample(scale_factor=1.5, mode="bilinear"), image),
        (nn.Upsample(size=(4, 9), mode="bicubic", align_corners=True), image),
        (nn.Upsample(scale_factor=2, mode="nearest"), image),
        (nn.PixelShuffle(2), image),
        (nn.Unfold(2, padding=1), image),
        (nn.Fold((5, 6), 2), real(2, 12, 20)),
        (nn.CrossEntropyLoss(torch.rand(5), label_smoothing=0.1), (real(4, 5), labels)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.rand(5)), (real(4, 5), unit(4, 5))),
        (nn.KLDivLoss(reduction="batchmean"), (real(4, 5), unit(4, 5))),
        (nn.HingeEmbeddingLoss(), (real(4), signs(4))),
        (nn.TripletMarginLoss(), (real(4, 3), real(4, 3), real(4, 3))),
        (nn.MultiLabelMarginLoss(), (real(1, 4), np.array([[3, 0, -1, 1]]))),
    ]
    return Many([layer for layer, _ in pairs]).double(), tuple(given for _, given in pairs)


def test_imported_layers():
    module, inputs = imported_layers()

    def each(tree, make):
        return tuple(each(one, make) for one in tree) if isinstance(tree, tuple) else make(tree)

    example = each(inputs, torch.tensor)
    expected = module(*example)
    model = pc.from_torch(module, example)

    def rank():
        model.place(PAIR)
        made = model(*each(inputs, lambda array: pc.tensor(array, PAIR, "S(0)")))
        return [one.numpy() for one in flat(made)]

    for ours, theirs in zip(spawn(rank, 2)[0], expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), 1e-8, 1e-9)
