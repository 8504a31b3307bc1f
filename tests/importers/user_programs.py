"""Programs as users of PyTorch write them: one text, which runs on PyTorch and on this package.

`lib` is one of both (see `test_user_programs`): `lib.m` the package, `lib.tensor` makes a tensor,
`lib.init` gives a model its weights and place, `lib.p` is a parameter's tensor.
"""

from __future__ import annotations

import math

import numpy as np

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def R(seed):
    return np.random.default_rng(seed)


def data(seed, *shape, dtype="float32"):
    return R(seed).normal(size=shape).astype(dtype)


def mlp(lib, a=6, h=8, b=4):
    nn = lib.m.nn
    return lib.init(nn.Sequential(nn.Linear(a, h), nn.ReLU(), nn.Linear(h, b)))


@program
def train_sgd(lib):
    F = lib.m.nn.functional
    model = mlp(lib)
    opt = lib.m.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = lib.tensor(data(0, 8, 6)), lib.tensor(R(1).integers(0, 4, 8))
    out = []
    for _ in range(4):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        out.append(loss.item())
    return out


@program
def weight_decay_groups(lib):
    F = lib.m.nn.functional
    model = mlp(lib)
    decay = [p for n, p in model.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    opt = lib.m.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01
    )
    x, y = lib.tensor(data(0, 8, 6)), lib.tensor(data(2, 8, 4))
    out = []
    for _ in range(4):
        opt.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        out.append(loss.item())
    return out


@program
def warmup_cosine(lib):
    m = lib.m
    model = mlp(lib)
    opt = m.optim.AdamW(model.parameters(), lr=0.25)
    sched = m.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / 3) * 0.5 * (1 + math.cos(math.pi * s / 10))
    )
    x, y = lib.tensor(data(0, 8, 6)), lib.tensor(data(2, 8, 4))
    out = []
    for _ in range(5):
        opt.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        opt.step()
        sched.step()
        out += [loss.item(), opt.param_groups[0]["lr"]]
    return out


@program
def ntxent(lib):
    m, F = lib.m, lib.m.nn.functional
    z1, z2 = lib.tensor(data(0, 4, 6), True), lib.tensor(data(1, 4, 6), True)
    z = F.normalize(m.cat([z1, z2], dim=0), dim=1)
    sim = z @ z.T / 0.5
    eye = m.eye(8, dtype=lib.bool, **lib.on)
    sim = sim.masked_fill(eye, float("-inf"))
    labels = m.cat([m.arange(4, 8, **lib.on), m.arange(0, 4, **lib.on)])
    loss = F.cross_entropy(sim, labels)
    loss.backward()
    return [loss, z1.grad, z2.grad]


@program
def hard_triplets(lib):
    _m, F = lib.m, lib.m.nn.functional
    e = lib.tensor(data(0, 8, 3), True)
    y = lib.tensor(np.array([0, 0, 1, 1, 2, 2, 3, 3]))
    d = (e[:, None, :] - e[None, :, :]).pow(2).sum(-1)
    same = y[:, None] == y[None, :]
    pos = (d * same.float()).max(dim=1)
    pos = pos[0] if isinstance(pos, tuple) else pos
    neg = d.masked_fill(same, 1e9).min(dim=1)
    neg = neg[0] if isinstance(neg, tuple) else neg
    loss = F.relu(pos - neg + 1.0).mean()
    loss.backward()
    return [loss, e.grad]


@program
def einsum_attention(lib):
    m, F = lib.m, lib.m.nn.functional
    q, k, v = (lib.tensor(data(i, 2, 4, 6, 4), True) for i in range(3))
    s = m.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(4)
    mask = m.ones((6, 6), dtype=lib.bool, **lib.on).tril()
    s = s.masked_fill(~mask, float("-inf"))
    o = m.einsum("bhij,bhjd->bhid", F.softmax(s, dim=-1), v)
    o.pow(2).sum().backward()
    return [o, q.grad, k.grad, v.grad]


@program
def heads_by_view(lib):
    _m, _F = lib.m, lib.m.nn.functional
    B, Tn, H, D = 2, 6, 2, 4
    x = lib.tensor(data(0, B, Tn, H * D), True)
    w = lib.tensor(data(1, H * D, 3 * H * D), True)
    q, k, v = (x @ w).chunk(3, dim=-1)
    q, k, v = (t.reshape(B, Tn, H, D).transpose(1, 2) for t in (q, k, v))
    att = (q @ k.transpose(-2, -1)) * D**-0.5
    att = att.softmax(dim=-1)
    y = (att @ v).transpose(1, 2).contiguous().view(B, Tn, H * D)
    y.mean().backward()
    return [y, x.grad, w.grad]


@program
def length_masks(lib):
    m = lib.m
    x = lib.tensor(data(0, 4, 6, 3), True)
    n = lib.tensor(np.array([6, 2, 4, 1]))
    mask = m.arange(6, **lib.on)[None, :] < n[:, None]
    mean = (x * mask.unsqueeze(-1).float()).sum(1) / n[:, None].float()
    last = x[m.arange(4, **lib.on), n - 1]
    (mean.sum() + (last**2).sum()).backward()
    return [mask, mean, last, x.grad]


@program
def beam_step(lib):
    m, F = lib.m, lib.m.nn.functional
    B, K, V = 2, 3, 8
    scores = lib.tensor(data(0, B, K))
    logits = lib.tensor(data(1, B, K, V))
    logp = F.log_softmax(logits, dim=-1)
    total = (scores.unsqueeze(-1) + logp).view(B, -1)
    top, idx = total.topk(K, dim=-1)
    beam = m.div(idx, V, rounding_mode="floor")
    tok = idx % V
    seqs = lib.tensor(R(2).integers(0, V, (B, K, 4)))
    seqs = seqs.gather(1, beam.unsqueeze(-1).expand(-1, -1, 4))
    seqs = m.cat([seqs, tok.unsqueeze(-1)], dim=-1)
    return [top, beam, tok, seqs]


@program
def greedy_decode(lib):
    m = lib.m
    emb = lib.tensor(data(0, 8, 6))
    w = lib.tensor(data(1, 6, 8))
    tok = lib.tensor(np.array([1, 2, 3, 4]))
    out = [tok]
    done = tok == 99
    for _ in range(5):
        logits = emb[out[-1]] @ w
        nxt = logits.argmax(dim=-1)
        nxt = m.where(done, m.zeros_like(nxt), nxt)
        done = done | (nxt == 0)
        out.append(nxt)
        if done.all():
            break
    return [m.stack(out, dim=1), done]


@program
def nucleus_filter(lib):
    m, F = lib.m, lib.m.nn.functional
    logits = lib.tensor(data(0, 4, 8) * 2)
    s, i = m.sort(logits, dim=-1, descending=True)
    c = m.cumsum(F.softmax(s, dim=-1), dim=-1)
    remove = c > 0.8
    remove[..., 1:] = remove[..., :-1].clone()
    remove[..., 0] = False
    mask = m.zeros_like(remove).scatter(1, i, remove)
    return [logits.masked_fill(mask, float("-inf"))]


@program
def masked_assignment(lib):
    x = lib.tensor(data(0, 4, 6))
    x[x < 0] = 0
    x[x > 1] *= 0.5
    x[1, 2:5] += 10
    x[:, 0] = x[:, 1]
    x[[0, 2]] = x[[2, 0]]
    return [x]


@program
def in_place_on_tape(lib):
    x = lib.tensor(data(0, 4, 6), True)
    y = x * 2
    y[1] = 0
    y[:, 2:4] *= 3
    y.clamp_(min=-1).add_(1)
    y.sum().backward()
    return [y, x.grad]


@program
def tied_weights(lib):
    nn, F = lib.m.nn, lib.m.nn.functional

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(10, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, t):
            return self.head(self.emb(t))

    model = lib.init(M())
    opt = lib.m.optim.Adam(model.parameters(), lr=0.05)
    t, y = lib.tensor(R(0).integers(0, 10, (4, 6))), lib.tensor(R(1).integers(0, 10, (4, 6)))
    out = [len(list(model.parameters()))]
    for _ in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(model(t).view(-1, 10), y.view(-1))
        loss.backward()
        opt.step()
        out.append(loss.item())
    return out


@program
def frozen_parameters(lib):
    m = lib.m
    model = mlp(lib)
    lib.freeze(model[0])
    opt = m.optim.SGD([p for p in model.parameters() if lib.trains(p)], lr=0.1)
    x, y = lib.tensor(data(0, 8, 6)), lib.tensor(data(2, 8, 4))
    for _ in range(2):
        opt.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        opt.step()
    return [lib.p(p) for p in model.parameters()]


@program
def gradient_hooks(lib):
    x = lib.tensor(data(0, 4, 6), True)
    seen = []
    y = x**2
    y.register_hook(lambda g: g * 3)
    x.register_hook(lambda g: seen.append(g.sum()))
    y.sum().backward()
    return [x.grad, seen[0], len(seen)]


@program
def accumulation(lib):
    m = lib.m
    model = mlp(lib)
    opt = m.optim.SGD(model.parameters(), lr=0.1)
    x, y = lib.tensor(data(0, 8, 6)), lib.tensor(data(2, 8, 4))
    out = []
    for _ in range(2):
        opt.zero_grad()
        for xb, yb in zip(x.split(4), y.split(4), strict=True):
            loss = ((model(xb) - yb) ** 2).mean() / 2
            loss.backward()
            out.append(loss.item())
        opt.step()
    return out


@program
def batch_norm_train_eval(lib):
    m, nn = lib.m, lib.m.nn
    model = lib.init(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()))
    x = lib.tensor(data(0, 8, 6))
    outs = [model(x), model(x * 2)]
    model.eval()
    with m.no_grad():
        outs.append(model(x))
    model.train()
    outs.append(model(x).sum())
    return [*outs, lib.p(model[1].running_mean), lib.p(model[1].running_var)]


@program
def lstm_classifier(lib):
    nn, F = lib.m.nn, lib.m.nn.functional

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(12, 3)

        def forward(self, x):
            out, (h, _c) = self.rnn(x)
            return self.fc(out[:, -1]) + h.sum() * 0.01

    model = lib.init(Net())
    opt = lib.m.optim.Adam(model.parameters(), lr=0.02)
    x, y = lib.tensor(data(0, 4, 6, 5)), lib.tensor(np.array([0, 1, 2, 1]))
    out = []
    for _ in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        out.append(loss.item())
    return out


@program
def scatter_sums(lib):
    m = lib.m
    idx = lib.tensor(R(0).integers(0, 5, 8))
    x = lib.tensor(data(1, 8, 4), True)
    s = x.new_zeros(5, 4).index_add(0, idx, x)
    n = m.zeros_like(s[:, 0]).scatter_add(0, idx, m.ones_like(x[:, 0]))
    mean = s / n.clamp(min=1).unsqueeze(1)
    back = mean[idx]
    ((x - back) ** 2).sum().backward()
    return [s, n, mean, x.grad]


@program
def kmeans(lib):
    x = lib.tensor(data(0, 12, 2))
    c = x[:3].clone()
    for _ in range(3):
        d = ((x[:, None] - c[None]) ** 2).sum(-1)
        a = d.argmin(dim=1)
        for k in range(3):
            sel = a == k
            if sel.any():
                c[k] = x[sel].mean(0)
    return [c, a]


@program
def newton(lib):
    x = lib.tensor(np.array([2.0, 3.0, 0.5]), True)
    for _ in range(3):
        f = (x**4 - 3 * x).sum()
        (g,) = lib.grad(f, [x], create_graph=True)
        (h,) = lib.grad(g.sum(), [x])
        x = (x - g / h).detach()
        x.requires_grad_(True) if hasattr(x, "requires_grad_") else setattr(
            x, "requires_grad", True
        )
    return [x]


@program
def gradient_penalty(lib):
    m = lib.m
    d = mlp(lib, 6, 8, 1)
    real, fake = lib.tensor(data(0, 4, 6)), lib.tensor(data(1, 4, 6))
    eps = lib.tensor(R(2).random((4, 1)).astype("float32"))
    x = (eps * real + (1 - eps) * fake).detach()
    x.requires_grad = True
    score = d(x)
    (g,) = lib.grad(score, [x], grad_outputs=m.ones_like(score), create_graph=True)
    loss = ((g.norm(2, dim=1) - 1) ** 2).mean()
    loss.backward()
    return [loss, lib.p(d[0].weight).grad]


@program
def maml_step(lib):
    w = lib.tensor(data(0, 6, 1), True)
    x, y = lib.tensor(data(1, 8, 6)), lib.tensor(data(2, 8, 1))
    inner = ((x[:4] @ w - y[:4]) ** 2).mean()
    (g,) = lib.grad(inner, [w], create_graph=True)
    outer = ((x[4:] @ (w - 0.1 * g) - y[4:]) ** 2).mean()
    outer.backward()
    return [outer, w.grad]


@program
def policy_gradient(lib):
    m, F = lib.m, lib.m.nn.functional
    logits = lib.tensor(data(0, 8, 4), True)
    a = lib.tensor(R(1).integers(0, 4, 8))
    adv = lib.tensor(data(2, 8))
    logp = F.log_softmax(logits, -1)
    lp = logp.gather(1, a[:, None]).squeeze(-1)
    ratio = (lp - lp.detach() + 0.1).exp()
    loss = -m.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    ent = -(logp.exp() * logp).sum(-1).mean()
    (loss - 0.01 * ent).backward()
    return [loss, ent, logits.grad]


@program
def viterbi(lib):
    m = lib.m
    e, tr = lib.tensor(data(0, 4, 5, 3)), lib.tensor(data(1, 3, 3))
    score, back = e[:, 0], []
    for t in range(1, 5):
        s = score[:, :, None] + tr[None]
        back.append(s.argmax(1))
        score = s.amax(1) + e[:, t]
    path = [score.argmax(-1)]
    for b in reversed(back):
        path.append(b.gather(1, path[-1][:, None]).squeeze(1))
    return [m.stack(path[::-1], 1), score.amax(-1)]


@program
def box_iou(lib):
    m = lib.m

    def boxes(s, n):
        a = R(s).random((n, 2))
        return np.concatenate([a, a + R(s + 9).random((n, 2)) + 0.1], 1).astype("float32")

    a, b = lib.tensor(boxes(0, 4)), lib.tensor(boxes(1, 6))

    def area(t):
        return (t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1])

    lt, rb = m.max(a[:, None, :2], b[:, :2]), m.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    return [inter / (area(a)[:, None] + area(b) - inter)]


@program
def nms(lib):
    s = lib.tensor(R(0).random(6).astype("float32"))
    iou = lib.tensor(R(1).random((6, 6)).astype("float32"))
    order, keep = s.argsort(descending=True), []
    while order.numel() > 0:
        i = order[0].item()
        keep.append(i)
        rest = order[1:]
        if rest.numel() == 0:
            break
        order = rest[iou[i, rest] <= 0.5]
    return keep


@program
def positional_encoding(lib):
    m = lib.m
    pos = m.arange(6, **lib.on).unsqueeze(1).float()
    div = m.exp(m.arange(0, 8, 2, **lib.on).float() * (-math.log(10000.0) / 8))
    pe = m.zeros((6, 8), **lib.on)
    pe[:, 0::2] = m.sin(pos * div)
    pe[:, 1::2] = m.cos(pos * div)
    return [pe, pe.unsqueeze(0)[:, :4]]


@program
def qkv_unbind(lib):
    m = lib.m
    x = lib.tensor(data(0, 2, 6, 24), True)
    q, k, v = x.reshape(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    y = m.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.sum().backward()
    return [y, x.grad]


@program
def routed_experts(lib):
    m, F = lib.m, lib.m.nn.functional
    x = lib.tensor(data(0, 8, 6), True)
    w = lib.tensor(data(1, 6, 3), True)
    e = lib.tensor(data(2, 3, 6, 6), True)
    p = F.softmax(x @ w, dim=-1)
    top, idx = p.topk(2, dim=-1)
    top = top / top.sum(-1, keepdim=True)
    y = m.zeros_like(x)
    for k in range(3):
        rows, slot = m.where(idx == k)
        if rows.numel():
            y = y.index_add(0, rows, (x[rows] @ e[k]) * top[rows, slot, None])
    (y**2).sum().backward()
    return [y, x.grad, w.grad, e.grad]


@program
def where_alone(lib):
    m = lib.m
    x = lib.tensor(data(0, 4, 6))
    i, j = m.where(x > 0)
    return [i, j, x[i, j], m.nonzero(x > 0, as_tuple=False)]


@program
def sinkhorn(lib):
    m = lib.m
    c = lib.tensor(R(0).random((4, 6)).astype("float32"), True)
    k = (-c / 0.1).exp()
    u = m.ones((4,), **lib.on) / 4
    for _ in range(5):
        v = (m.ones((6,), **lib.on) / 6) / (k.T @ u)
        u = (m.ones((4,), **lib.on) / 4) / (k @ v)
    plan = u[:, None] * k * v[None]
    (plan * c).sum().backward()
    return [plan, c.grad]


@program
def straight_through(lib):
    m = lib.m
    x = lib.tensor(data(0, 4, 6), True)
    q = m.round(x * 4) / 4
    y = x + (q - x).detach()
    soft = x.softmax(-1)
    hard = m.nn.functional.one_hot(soft.argmax(-1), 6).float()
    z = hard - soft.detach() + soft
    (y.sum() + (z * m.arange(6, **lib.on)).sum()).backward()
    return [y, z, x.grad]


@program
def many_losses(lib):
    F = lib.m.nn.functional
    x, t = lib.tensor(data(0, 4, 6), True), lib.tensor(data(1, 4, 6))
    out = [
        F.mse_loss(x, t),
        F.l1_loss(x, t),
        F.smooth_l1_loss(x, t),
        F.huber_loss(x, t, delta=0.5),
        F.kl_div(x.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
        F.hinge_embedding_loss(x, t.sign()),
        F.soft_margin_loss(x, t.sign()),
        F.margin_ranking_loss(x[:, 0], t[:, 0], t[:, 1].sign(), margin=0.1),
        F.cosine_embedding_loss(x, t, t[:, 0].sign()),
        F.poisson_nll_loss(x, t.abs()),
        F.gaussian_nll_loss(x, t, t.abs() + 0.1),
    ]
    sum(out).backward()
    return [*out, x.grad]


@program
def bilinear(lib):
    m = lib.m
    a, b, w = (
        lib.tensor(data(0, 4, 3), True),
        lib.tensor(data(1, 4, 5), True),
        lib.tensor(data(2, 2, 3, 5), True),
    )
    y = m.einsum("bi,kij,bj->bk", a, w, b)
    y.sum().backward()
    return [
        y,
        a.grad,
        b.grad,
        w.grad,
        m.tensordot(a, w, dims=([1], [1])),
        m.einsum("ii->i", a[:3]),
        m.einsum("ii", a[:3]),
        m.einsum("...ii->...", w[:, :, :3]),
    ]


@program
def integer_maths(lib):
    m = lib.m
    a, b = lib.tensor(R(0).integers(-9, 9, (4, 6))), lib.tensor(R(1).integers(1, 5, (4, 6)))
    return [
        a // b,
        a % b,
        a / b,
        a & b,
        a | b,
        a ^ b,
        ~a,
        a << 1,
        m.remainder(a, b),
        m.fmod(a, b),
        a.abs().sum(),
        a.float().mean(),
        (a > 0).sum(),
        a.cumsum(1),
        a.prod(1),
        m.bitwise_and(a, 3),
    ]


@program
def transformer_layer(lib):
    _m, nn = lib.m, lib.m.nn
    layer = lib.init(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = lib.tensor(data(0, 4, 6, 8), True)
    pad = lib.tensor(np.arange(6)[None] >= np.array([6, 4, 5, 3])[:, None])
    y = layer(x, src_key_padding_mask=pad)
    y.sum().backward()
    return [y, x.grad]


@program
def game_of_life(lib):
    _m, F = lib.m, lib.m.nn.functional
    b = lib.tensor((R(0).random((8, 6)) > 0.6).astype("float32"))
    k = lib.tensor(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]], "float32")[None, None])
    for _ in range(3):
        n = F.conv2d(F.pad(b[None, None], (1, 1, 1, 1), mode="circular"), k)[0, 0]
        b = ((n == 3) | ((b == 1) & (n == 2))).float()
    return [b, sum(b.roll((i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1))]


@program
def sparse_attention_topk(lib):
    m = lib.m
    s = lib.tensor(data(0, 2, 6, 6), True)
    v = lib.tensor(data(1, 2, 6, 4), True)
    top = s.topk(3, dim=-1)
    kept = m.full_like(s, -math.inf).scatter(-1, top.indices, top.values)
    y = kept.softmax(-1) @ v
    y.pow(2).sum().backward()
    return [y, s.grad, v.grad]


@program
def clip_grad_norm_util(lib):
    m = lib.m
    model = mlp(lib)
    opt = m.optim.SGD(model.parameters(), lr=0.5)
    x, y = lib.tensor(data(0, 8, 6)), lib.tensor(data(2, 8, 4) * 10)
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    total = m.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return [total, ((model(x) - y) ** 2).mean()]


@program
def distillation(lib):
    F = lib.m.nn.functional
    s, t, y = (
        lib.tensor(data(0, 8, 5), True),
        lib.tensor(data(1, 8, 5)),
        lib.tensor(R(2).integers(0, 5, 8)),
    )
    loss = F.kl_div(
        F.log_softmax(s / 2, 1), F.softmax(t / 2, 1), reduction="batchmean"
    ) * 4 + 0.1 * F.cross_entropy(
        s,
        y,
        weight=lib.tensor(
            np.arange(1, 6, dtype="float32"),
        ),
        ignore_index=2,
    )
    loss.backward()
    return [loss, s.grad]


@program
def python_protocols(lib):
    m = lib.m
    x = lib.tensor(data(0, 4, 6))
    n = lib.tensor(np.array([3, 1, 2]))
    rows = [r.sum() for r in x]
    _a, b, _c = n
    total = 0
    for v in n:
        total += int(v)
    return [
        m.stack(rows),
        total,
        [5, 6, 7, 8][n[0]],
        list(range(int(b))),
        float(x[0, 0]),
        f"{x[0, 0].item():.3f}",
        x.tolist()[1][:2],
        bool((x > 0).any()),
        len(x),
        x[-1],
        x[..., 0],
        x[:, None].shape[1],
        x[1:3, ::2],
        divmod(7, 2),
        sum(n),
        max(n),
        sorted(n.tolist()),
        -x,
        +x,
        abs(x),
        x @ x.T,
        3 in n.tolist(),
        x.sum() > 0,
    ]


@program
def advanced_indexing(lib):
    m = lib.m
    x = lib.tensor(data(0, 4, 5, 6))
    i, j = lib.tensor(np.array([[0, 1], [2, 3]])), lib.tensor(np.array([4, 0]))
    return [
        x[i],
        x[i, j],
        x[:, j],
        x[i, :, j],
        x[[0, 2]],
        x[[0, 2], [1, 3]],
        x[x > 1],
        x[x[:, 0, 0] > 0],
        x[..., j],
        x[None, 1, ..., -1],
        x[0, 1:4, ::2],
        x[:, [0, 0, 1]],
        x[-1, -1, -1],
        x[m.arange(4, **lib.on), :, m.arange(4, **lib.on)],
        x[:, :, [True, False] * 3],
    ]


@program
def advanced_assignment(lib):
    m = lib.m
    x = lib.tensor(data(0, 4, 5, 6))
    i = lib.tensor(np.array([0, 2]))
    x[i] = 0
    x[:, 1] += 1
    x[0, :, i] = 7.0
    x[x > 2] = 2
    x[..., -1] = lib.tensor(data(1, 4, 5))
    x[1:3, ::2, 0] -= 1
    x[:, :, 1:3] = x[:, :, 3:5]
    y = m.zeros_like(x[0])
    y[[0, 1], [1, 2]] = lib.tensor(np.array([5.0, 6.0], "float32"))
    y[2] = y[0] + 1
    x.fill_(0.5) if False else None
    z = x.clone()
    z.masked_fill_(z < 0, -1.0)
    z[0].zero_()
    z[1, 2].fill_(3.0)
    z.transpose(1, 2)[0, 0] = 9
    w = z.view(-1, 6)
    w[3].mul_(2)
    w.t()[0].add_(1)
    return [
        x,
        y,
        z,
        w,
        z.index_fill(1, i, -2.0),
        z.index_copy(1, i, z[:, 3:5]),
        z.masked_scatter(z > 1, m.arange(120, **lib.on).float()),
        z.scatter(2, i.view(1, 1, 2).expand(4, 5, 2), 1.0),
    ]


@program
def views_share(lib):
    x = lib.tensor(data(0, 4, 6))
    y = x.view(6, 4)
    z = x.t()
    w = x[1]
    v = x.reshape(-1)[3:9]
    x.add_(1)
    w.mul_(2)
    z[0] = 0
    v.sub_(5)
    y[5, 3] = 42
    d = x.detach()
    d[0, 0] = -1
    return [x, y, z, w, v]


@program
def modules_of_modules(lib):
    nn, _F = lib.m.nn, lib.m.nn.functional

    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.norm, self.fc = (
                nn.LayerNorm(d),
                nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)),
            )
            self.scale = (
                nn.Parameter(lib.m.ones(d)) if lib.torch else nn.Parameter((d,), init="ones")
            )

        def forward(self, x):
            return x + self.fc(self.norm(x)) * lib.p(self.scale)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(6) for _ in range(2)])
            self.heads = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)})

        def forward(self, x):
            for b in self.blocks:
                x = b(x)
            return {k: h(x) for k, h in self.heads.items()}

    model = lib.init(Net())
    x = lib.tensor(data(0, 4, 6))
    out = model(x)
    (out["a"].sum() + out["b"].pow(2).mean()).backward()
    names = sorted(n for n, _ in model.named_parameters())
    return [
        out["a"],
        out["b"],
        len(names),
        names[0],
        names[-1],
        lib.p(model.blocks[0].scale).grad,
        len(model.state_dict()),
        sum(1 for m in model.modules() if isinstance(m, nn.Linear)),
    ]
