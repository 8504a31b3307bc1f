"""Layers that have PyTorch's names: the names of their parameters, and what they compute, in jobs,
eagerly on two ranks, and compiled."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from tests.dense import DenseRun

nn = pc.nn
PAIR = pc.Placement("cpu", [0, 1])
RANDOM = np.random.default_rng(7)


def real(*shape):
    return RANDOM.normal(size=shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def run_layer(model, *arrays):
    """A layer's outputs in a job on one rank, and its variables."""
    with pc.job("j") as job:
        given = [
            pc.input(f"x{n}", each.shape, str(each.dtype), PAIR) for n, each in enumerate(arrays)
        ]
        made = model(*given)
        for n, value in enumerate(flat(made)):
            pc.output(f"y{n}", value)
    run = DenseRun(job)
    outputs = run.step(**{f"x{n}": each for n, each in enumerate(arrays)})
    return [outputs[f"y{n}"] for n in range(len(outputs))], run.variables


def flat(tree):
    if isinstance(tree, (tuple, list)):
        return [leaf for each in tree for leaf in flat(each)]
    return [tree]


# --- recurrent layers -----------------------------------------------------------------------------


def lstm_step(gates, h, c):
    i, f, g, o = np.split(gates, 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def recurrent(kind, variables, suffix, x, reverse, first=None):
    """One layer in one direction, time by time; its states and the last cell."""
    w, u, b, d = (
        variables[f"{name}{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    projection = variables.get(f"weight_hr{suffix}")
    h = c = np.zeros((x.shape[1], u.shape[1]))
    if kind == "LSTM":
        c = np.zeros((x.shape[1], u.shape[0] // 4))
    if first is not None:
        h, c = first
    made = np.zeros((*x.shape[:2], u.shape[1]))
    for time in range(len(x))[:: -1 if reverse else 1]:
        by_input, by_state = x[time] @ w.T + b, h @ u.T + d
        if kind == "LSTM":
            h, c = lstm_step(by_input + by_state, h, c)
            h = h if projection is None else h @ projection.T
        elif kind == "GRU":
            (ri, zi, ni), (rh, zh, nh) = np.split(by_input, 3, -1), np.split(by_state, 3, -1)
            z = sigmoid(zi + zh)
            h = (1 - z) * np.tanh(ni + sigmoid(ri + rh) * nh) + z * h
        else:
            h = np.tanh(by_input + by_state)
        made[time] = h
    return made, h, c


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind):
    x = real(4, 3, 2)
    model = getattr(nn, kind)(2, 3, num_layers=2, bidirectional=True, dtype="float64")
    (y, h, *cells), variables = run_layer(model, x)
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    suffixes = ["_l0", "_l0_reverse", "_l1", "_l1_reverse"]
    assert list(variables) == [name + suffix for suffix in suffixes for name in names]
    bound = 1 / np.sqrt(3)
    assert all(np.abs(each).max() <= bound for each in variables.values())
    made = x
    for layer in range(2):
        parts = []
        for direction in range(2):
            place = 2 * layer + direction
            each, last, cell = recurrent(kind, variables, suffixes[place], made, direction == 1)
            np.testing.assert_allclose(h[place], last, 1e-10)
            for given in cells:
                np.testing.assert_allclose(given[place], cell, 1e-10)
            parts.append(each)
        made = np.concatenate(parts, -1)
    np.testing.assert_allclose(y, made, 1e-10)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_projects_its_state(bidirectional):
    x, directions = real(4, 3, 2), 1 + bidirectional
    first = real(directions, 3, 2), real(directions, 3, 5)
    model = nn.LSTM(2, 5, proj_size=2, bidirectional=bidirectional, dtype="float64")
    with pc.job("j") as job:
        given = [pc.constant(each, "float64", PAIR) for each in first]
        y, (h, c) = model(pc.input("x", x.shape, "float64", PAIR), given)
        for name, value in (("y", y), ("h", h), ("c", c)):
            pc.output(name, value)
    run = DenseRun(job)
    outputs = run.step(x=x)
    assert run.variables["weight_hr_l0"].shape == (2, 5)
    for place, suffix in enumerate(["_l0", "_l0_reverse"][:directions]):
        begun = first[0][place], first[1][place]
        made, last, cell = recurrent("LSTM", run.variables, suffix, x, place == 1, begun)
        np.testing.assert_allclose(outputs["y"][..., 2 * place : 2 * place + 2], made, 1e-10)
        np.testing.assert_allclose(outputs["h"][place], last, 1e-10)
        np.testing.assert_allclose(outputs["c"][place], cell, 1e-10)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_are_read_each_by_itself(kind):
    lengths = [3, 5, 1, 4]
    x = real(6, 4, 2)
    model = getattr(nn, kind)(2, 3, num_layers=2, bidirectional=True, dtype="float64").place(PAIR)

    def rank():
        alone = []
        for place, length in enumerate(lengths):
            alone.append(flat(model(pc.tensor(x[:length, place : place + 1], PAIR))))
        for sbp in ("B", "S(1)"):
            for given in (lengths, pc.tensor(np.array(lengths), PAIR, "S(0)")):
                packed = nn.pack_padded_sequence(pc.tensor(x, PAIR, sbp), given)
                made, last = model(packed)
                y, ends = nn.pad_packed_sequence(made, padding_value=7.0, total_length=6)
                assert ends.tolist() == lengths
                assert packed.padded.shape == (5, 4, 2)
                for place, length in enumerate(lengths):
                    wanted, *states = [each.numpy() for each in alone[place]]
                    whole = np.full((6, 6), 7.0)
                    whole[:length] = wanted[:, 0]
                    np.testing.assert_allclose(y.numpy()[:, place], whole, 1e-12)
                    for got, state in zip(flat(last), states, strict=True):
                        np.testing.assert_allclose(got.numpy()[:, place], state[:, 0], 1e-12)

    spawn(rank, 2)


def test_lengths_may_be_fed_to_a_job():
    """Nothing is known of them: all steps stay, and an empty sequence leaves its first state."""
    x, lengths = real(5, 3, 2), np.array([4, 0, 2])
    model = nn.GRU(2, 3, dtype="float64")
    with pc.job("j") as job:
        given = pc.input("lengths", (3,), "int64", PAIR)
        packed = nn.pack_padded_sequence(pc.input("x", x.shape, "float64", PAIR), given)
        made, h = model(packed)
        pc.output("y", nn.pad_packed_sequence(made)[0])
        pc.output("h", h)
    run = DenseRun(job)
    outputs = run.step(x=x, lengths=lengths)
    made, *_ = recurrent("GRU", run.variables, "_l0", x, False)
    inside = np.arange(5)[:, None] < lengths
    np.testing.assert_allclose(outputs["y"], np.where(inside[..., None], made, 0.0), 1e-10)
    np.testing.assert_allclose(outputs["h"][0, 0], made[3, 0], 1e-10)
    np.testing.assert_allclose(outputs["h"][0, 1], 0.0)


def test_sequences_of_several_lengths_are_padded():
    rows = [np.arange(1.0, 4.0), np.arange(4.0, 5.0)]
    given = [pc.tensor(each, pc.Placement("cpu", [0])) for each in rows]
    padded = nn.pad_sequence(given, batch_first=True, padding_value=-1.0)
    assert padded.tolist() == [[1.0, 2.0, 3.0], [4.0, -1.0, -1.0]]
    left = nn.pad_sequence(given, padding_side="left")
    assert left.tolist() == [[1.0, 0.0], [2.0, 0.0], [3.0, 4.0]]
    packed = nn.pack_sequence(given)
    assert packed.lengths.tolist() == [3, 1]
    assert nn.pad_packed_sequence(packed, True, -1.0)[0].tolist() == padded.tolist()
    for error, call in (
        (AttributeValueError, lambda: nn.pack_padded_sequence(padded, [3, 1, 1])),
        (AttributeValueError, lambda: nn.pack_padded_sequence(padded, [0, 1], True)),
        (ShapeError, lambda: nn.pack_padded_sequence(padded, [3], True)),
        (ShapeError, lambda: nn.pack_padded_sequence(padded, padded, True)),
        (ShapeError, lambda: nn.pad_packed_sequence(packed, total_length=2)),
        (UsageError, lambda: nn.pad_packed_sequence(padded)),
        (UsageError, lambda: nn.pad_sequence([])),
        (AttributeValueError, lambda: nn.pad_sequence(given, padding_side="top")),
    ):
        with pytest.raises(error):
            call()


def test_forms_of_a_recurrent_layer():
    """A batch in front, no batch, first states, and a layer that is cut in two."""
    model = nn.LSTM(2, 3, batch_first=True, dtype="float64").place(PAIR)

    def rank():
        x = pc.tensor(real_x := np.random.default_rng(1).normal(size=(2, 4, 2)), PAIR, "S(0)")
        y, (h, c) = model(x)
        first, state = model(x[:, :2])
        second, (again, cells) = model(x[:, 2:], state)
        alone, _ = model(pc.tensor(real_x[1], PAIR, "B"))
        assert y.shape == (2, 4, 3)
        np.testing.assert_allclose(pc.concat([first, second], 1).numpy(), y.numpy(), 1e-12)
        np.testing.assert_allclose(again.numpy(), h.numpy(), 1e-12)
        np.testing.assert_allclose(cells.numpy(), c.numpy(), 1e-12)
        np.testing.assert_allclose(alone.numpy(), y.numpy()[1], 1e-12)

    spawn(rank, 2)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_cells_are_steps_of_their_layers(kind):
    def rank():
        layer = getattr(nn, kind)(2, 3, dtype="float64").place(PAIR)
        cell = getattr(nn, f"{kind}Cell")(2, 3, dtype="float64").place(PAIR)
        state = {name.removesuffix("_l0"): each for name, each in layer.state_dict().items()}
        cell.load_state_dict(state)
        x = pc.tensor(np.random.default_rng(1).normal(size=(3, 2, 2)), PAIR, "S(1)")
        y, _ = layer(x)
        kept = None
        for time in range(3):
            kept = cell(x[time], kept)
        last = kept[0] if kind == "LSTM" else kept
        np.testing.assert_allclose(last.numpy(), y.numpy()[2], 1e-12)

    spawn(rank, 2)


def test_a_recurrent_model_trains_alike_in_jobs_eagerly_and_compiled():
    x, target = real(5, 4, 2).astype(np.float32), real(4, 1).astype(np.float32)

    class Model(nn.Module):
        def __init__(self):
            self.recurrent = nn.GRU(2, 3, num_layers=2)
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.recurrent(x)[0][-1])

    def build():
        with pc.job("trains") as job:
            given = pc.input("x", x.shape, "float32", PAIR, ["S(1)"])
            wanted = pc.input("t", target.shape, "float32", PAIR, ["S(0)"])
            loss = pc.mse_loss(Model()(given), wanted)
            pc.optim.SGD(lr=0.2).minimize(loss)
            pc.output("loss", loss)
        return job

    with pc.run(build(), ranks=2, cache=False) as session:
        compiled = [float(session.step(x=x, t=target)["loss"]) for _ in range(4)]

    def rank(wrap):
        pc.manual_seed(0)
        model = Model().place(PAIR)
        optimizer = pc.optim.SGD(model.parameters(), lr=0.2)

        def step(given, wanted):
            loss = pc.mse_loss(model(given), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = pc.compile(step) if wrap else step
        given, wanted = pc.tensor(x, PAIR, "S(1)"), pc.tensor(target, PAIR, "S(0)")
        return [step(given, wanted).item() for _ in range(4)]

    assert compiled[-1] < compiled[0]
    for wrap in (False, True):
        np.testing.assert_allclose(spawn(rank, 2, wrap)[0], compiled, 1e-5)


# --- attention ------------------------------------------------------------------------------------


def attended(q, k, v, heads, hidden=None):
    """Head by head, of one sequence; `hidden` [t, s] hides keys."""
    parts, weights = [], []
    for rows in np.split(np.arange(q.shape[-1]), heads):
        scores = q[:, rows] @ k[:, rows].T / np.sqrt(len(rows))
        if hidden is not None:
            scores = np.where(hidden, -np.inf, scores)
        powers = np.exp(scores)
        weights.append(powers / powers.sum(-1, keepdims=True))
        parts.append(weights[-1] @ v[:, rows])
    return np.concatenate(parts, -1), np.mean(weights, 0)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    query, memory = real(4, 2, 6), real(5, 2, 6)
    hidden = np.triu(np.ones((4, 5), bool), 2)
    padding = np.array([[False] * 5, [False, False, False, False, True]])
    model = nn.MultiheadAttention(6, 2, dtype="float64")

    class Masked(nn.Module):
        def __init__(self):
            self.attention = model

        def forward(self, query, memory, hidden, padding):
            made, weights = self.attention(query, memory, memory, padding, need_weights, hidden)
            return made if weights is None else (made, weights)

    (y, *rest), variables = run_layer(Masked(), query, memory, hidden, padding)
    variables = {name.removeprefix("attention."): each for name, each in variables.items()}
    named = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    assert [name for name, _ in model.named_parameters()] == named
    w, b, out, shift = (variables[name] for name in named)
    for n in range(2):
        q, k, v = (
            x[:, n] @ w[6 * at : 6 * at + 6].T + b[6 * at : 6 * at + 6]
            for at, x in enumerate((query, memory, memory))
        )
        made, weights = attended(q, k, v, 2, hidden | padding[n])
        np.testing.assert_allclose(y[:, n], made @ out.T + shift, 1e-9)
        for given in rest:
            np.testing.assert_allclose(given[n], weights, 1e-9)
    assert len(rest) == need_weights


def test_causal_attention_sees_nothing_later():
    def rank():
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, dtype="float64").place(PAIR)
        x = np.random.default_rng(1).normal(size=(4, 2, 8))
        later = x.copy()
        later[3] += 1
        once, again = (
            model(pc.tensor(each, PAIR, "S(1)"), is_causal=True).numpy() for each in (x, later)
        )
        np.testing.assert_allclose(once[:3], again[:3], 1e-12)
        assert np.abs(once[3] - again[3]).max() > 1e-3
        mask = pc.tensor(np.triu(np.ones((4, 4), bool), 1), PAIR, "B")
        masked = model(pc.tensor(x, PAIR, "S(1)"), mask).numpy()
        np.testing.assert_allclose(once, masked, 1e-9)

    spawn(rank, 2)


def normalized(x, weight, bias):
    away = x - x.mean(-1, keepdims=True)
    return away / np.sqrt((away**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer(norm_first):
    x = real(4, 1, 6)
    model = nn.TransformerEncoderLayer(6, 2, 8, 0.0, norm_first=norm_first, dtype="float64")
    (y,), w = run_layer(model, x)
    x = x[:, 0]

    def mixed(x):
        rows = [x @ part.T for part in np.split(w["self_attn.in_proj_weight"], 3)]
        return attended(*rows, 2)[0] @ w["self_attn.out_proj.weight"].T

    def fed(x):
        inner = np.maximum(x @ w["linear1.weight"].T + w["linear1.bias"], 0)
        return inner @ w["linear2.weight"].T + w["linear2.bias"]

    def norm(number, x):
        return normalized(x, w[f"norm{number}.weight"], w[f"norm{number}.bias"])

    if norm_first:
        x = x + mixed(norm(1, x))
        expected = x + fed(norm(2, x))
    else:
        x = norm(1, x + mixed(x))
        expected = norm(2, x + fed(x))
    np.testing.assert_allclose(y[:, 0], expected, 1e-9)


def test_names_of_a_transformer():
    names = [name for name, _ in nn.Transformer(4, 2, 1, 1, 8).named_parameters()]
    parts = {".".join(name.split(".")[:-1]) for name in names}
    layer = ["self_attn", "self_attn.out_proj", "linear1", "linear2", "norm1", "norm2"]
    more = ["multihead_attn", "multihead_attn.out_proj", "norm3"]
    assert parts == {
        "encoder.norm",
        "decoder.norm",
        *(f"encoder.layers.0.{each}" for each in layer),
        *(f"decoder.layers.0.{each}" for each in (*layer, *more)),
    }


# --- others ---------------------------------------------------------------------------------------


def test_layers_of_functions_keep_their_options():
    x, target = real(3, 4), real(3, 4)

    def rank():
        given, wanted = pc.tensor(x, PAIR, "S(0)"), pc.tensor(target, PAIR, "S(0)")
        assert repr(nn.ELU(0.5)) == "ELU()"
        np.testing.assert_allclose(nn.Threshold(0.1, 20.0)(given).numpy(), np.where(x > 0.1, x, 20))
        loss = nn.MSELoss(reduction="none")(given, wanted)
        np.testing.assert_allclose(loss.numpy(), (x - target) ** 2)
        weights = np.array([1.0, 2.0, 0.5, 3.0])
        loss = nn.BCEWithLogitsLoss(pos_weight=weights).place(PAIR)
        assert [name for name, _ in loss.named_parameters()] == ["pos_weight"]
        chances = 1 / (1 + np.exp(-target))
        signs = pc.tensor(chances, PAIR, "S(0)")
        expected = weights * chances * np.log1p(np.exp(-x)) + (1 - chances) * np.log1p(np.exp(x))
        np.testing.assert_allclose(loss(given, signs).item(), expected.mean())
        assert nn.ReflectionPad1d((1, 0))(given).shape == (3, 5)
        relu = nn.ReLU(inplace=True)
        np.testing.assert_allclose(relu(given).numpy(), np.maximum(x, 0))
        model = nn.Sequential(nn.Dropout1d(0.5), nn.RReLU()).eval()
        slopes = np.where(x > 0, x, x * (1 / 8 + 1 / 3) / 2)
        np.testing.assert_allclose(model(given).numpy(), slopes)

    spawn(rank, 2)


def test_a_row_of_padding_stays():
    def rank():
        table = nn.Embedding(5, 3, padding_idx=1).place(PAIR)
        ids = pc.tensor(np.array([1, 2, 1, 4]), PAIR, "S(0)")
        assert (table(ids).numpy()[0] == 0).all()
        table(ids).sum().backward()
        grad = table.weight.value.grad.numpy()
        np.testing.assert_array_equal(grad.sum(1), [0, 0, 3, 0, 3])

    spawn(rank, 2)


def test_containers_by_name():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Identity(1, of="anything")})
    model["extra"] = nn.ParameterList([nn.Parameter((2,)), nn.Parameter((3,))])
    assert [name for name, _ in model.named_parameters()] == [
        "first.weight",
        "first.bias",
        "extra.0",
        "extra.1",
    ]
    assert list(model) == ["first", "second", "extra"]
    assert len(model["extra"]) == 2
    del model["first"]
    assert "first" not in model
    with pytest.raises(UsageError, match="cannot have this name"):
        model["forward"] = nn.Identity()
    values = nn.ParameterDict({"scale": nn.Parameter((2,))})
    assert [name for name, _ in values.named_parameters()] == ["scale"]
    assert values["scale"].shape == (2,)


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (AttributeValueError, lambda: nn.LSTM(2, 0)),
        (AttributeValueError, lambda: nn.RNN(2, 3, nonlinearity="sine")),
        (AttributeValueError, lambda: nn.GRU(2, 3, dropout=1.5)),
        (AttributeValueError, lambda: nn.LSTM(2, 3, proj_size=3)),
        (AttributeValueError, lambda: nn.MultiheadAttention(6, 4)),
        (AttributeValueError, lambda: nn.TransformerEncoderLayer(4, 2, activation="sine")),
        (AttributeValueError, lambda: nn.Embedding(5, 3, padding_idx=5)),
        (UsageError, lambda: nn.InstanceNorm2d(3, track_running_stats=True)),
        (UsageError, lambda: nn.ELU(slope=3)),
        (UsageError, nn.MaxPool2d),
    ],
)
def test_wrong_options_are_refused(error, make):
    with pytest.raises(error):
        make()


def test_sequences_that_do_not_fit_are_refused():
    def rank():
        x = pc.tensor(real(4, 2, 3), PAIR, "B")
        with pytest.raises(ShapeError, match=r"test_nn_layers"):
            nn.LSTM(2, 3).place(PAIR)(x)
        with pytest.raises(ShapeError):
            nn.GRU(3, 2).place(PAIR)(x, x)
        with pytest.raises(ShapeError):
            nn.MultiheadAttention(4, 2).place(PAIR)(x, x, x)

    spawn(rank, 2)
