"""The attention of the independent model: projections, scores and operations, row by row and head by head.

d is a head's width, `width` that of its queries and keys if it differs, L the positions, S = L + 1 columns if a bias
adds a key or a logit, else L.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Config = dict[str, Any]


def attention(
    model: Config, own: Weights, layer: int, x: Tensor, times: Tensor, visible: Tensor, first_values: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Output of one attention layer, and A of every head (B, H, L, S); layer 1 appends its values to `first_values`."""
    H, G = model["heads"], model["kv_heads"] or model["heads"]
    d = model["width"] // H
    operation, bias, gate = model["attention"]["operation"], model["attention"]["bias"], model["gate"]["kind"]
    if model["projection"]["kind"] == "latent":
        q, k, v = latent(model, own, x, times)
    else:
        queries = 2 if operation["kind"] == "differential_v2" else 1
        rows = own["attention.qkv.weight"].split([queries * H * d, G * d, G * d])
        q, k, v = ((x @ matrix.T).unflatten(-1, (-1, d)) for matrix in rows)
    width, d = q.shape[-1], v.shape[-1]
    if gate == "value":
        w, b = own["attention.value_gate.weight"], own["attention.value_gate.bias"]
        v = v * torch.sigmoid((v * w).sum(-1) + b).unsqueeze(-1)
    if gate == "v_scale":
        start = d * {"declared": 2 / 5, "torch": 1 / 3}[model["init"]["kind"]]
        sizes = (v**2).sum(-1, keepdim=True)
        v = v * sizes / (sizes + start * torch.exp(own["attention.value_gate.theta"]).unsqueeze(-1))
    mixing = model["value_residual"]
    if layer == 1:
        first_values.append(v)
    elif mixing["kind"] == "fixed":
        v = mixing["first"] * first_values[0] + mixing["own"] * v
    elif mixing["kind"] == "learned":
        v = own["attention.value_residual.first"] * first_values[0] + own["attention.value_residual.own"] * v
    outs, scores, L = [], [], x.shape[1]
    for h in range(H):
        g = h * G // H
        key, value, logit = added(bias, own, h, g, width, d, x)
        keys = k[:, :, g] if key is None else torch.cat([k[:, :, g], key.expand(len(x), 1, width)], dim=1)
        values = v[:, :, g] if value is None else torch.cat([v[:, :, g], value.expand(len(x), 1, d)], dim=1)
        fading = faded(own, h, x) if operation["kind"] == "forgetting" else torch.zeros(1, L, L, dtype=x.dtype)
        row = Row(model, own, h, g, times, visible, fading, has_key=key is not None, logit=logit)
        if operation["kind"] == "differential":
            A = row.differential(q[:, :, h], keys, layer)
        elif operation["kind"] == "threshold_differential":
            A = row.threshold_differential(q[:, :, h], keys)
        elif operation["kind"] == "differential_v2":
            A = row.differential_v2(q[:, :, 2 * h], q[:, :, 2 * h + 1], keys, x)
        else:
            A = row(q[:, :, h], keys)
        if operation["kind"] == "stick_breaking":
            carried = {"dropped": 0.0, "own": values}.get(operation["rest"])
            carried = own["attention.core.learned.value"][h] if carried is None else carried
            out = A[..., :L] @ values + A[..., L:] * carried
        else:
            out = A @ values
        if operation["kind"] == "differential":
            out = rms_norm(out, own["attention.core.learned.norm.weight"], 1e-5) * (1 - lambda_init(operation, layer))
        if operation["kind"] == "threshold_differential":
            out = rms_norm(out, own["attention.core.learned.norm.weight"], 1e-5)
        if bias["kind"] == "v":
            out = out + own["attention.core.bias.value"][0 if bias["shared"] else g]
        if model["exclusive"]:
            own_v = v[:, :, g]
            out = out - (out * own_v).sum(-1, keepdim=True) / (own_v**2).sum(-1, keepdim=True) * own_v
            if own_value_alone(operation, bias):
                out = torch.where((visible.sum(-1) == 1).unsqueeze(-1), 0.0, out)
        if model["norm"]["head_norm"]:
            w = of_head(own["attention.head_norm.weight"], model["norm"]["head_norm"], h, H)
            out = rms_norm(out, w, model["norm"]["eps"])
        if gate == "head":
            w = own["attention.output_gate.linear.weight"][h]
            out = out * torch.sigmoid(x[..., : len(w)] @ w).unsqueeze(-1)
        if gate == "element":
            out = out * torch.sigmoid(x @ own["attention.output_gate.linear.weight"][h * d : (h + 1) * d].T)
        outs.append(out)
        scores.append(A)
    joined = sum(outs[1:], outs[0]) if model["head_outputs"] == "sum" else torch.cat(outs, dim=-1)
    return joined @ own["attention.out.weight"].T, torch.stack(scores, dim=1)


def own_value_alone(operation: Config, bias: Config) -> bool:
    """Return True if the output of a query that sees only itself is a multiple of its value (docs/interventions.md)."""
    value = bias.get("value") if bias["kind"] == "k" else None
    valued = bias["kind"] in ("kv", "v") or (isinstance(value, dict) and value["norm"] != 0)
    normed = operation["kind"] in ("differential", "threshold_differential")
    return not valued and not normed and operation.get("rest") != "learned"


def latent(model: Config, own: Weights, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, L, H, width) of multi-head latent attention, with their rotary part rotated."""
    H, given, eps = model["heads"], model["projection"], model["norm"]["eps"]
    d = model["width"] // H
    rank, nope, value = given["kv_rank"] or 4 * d, given["nope_width"] or d, given["value_width"] or d
    rope = given["rope_width"] or max(1, d // 2)
    w = {name.removeprefix("attention.latent."): weight for name, weight in own.items()}
    read = x
    if given["q_rank"] is not None:
        read = rms_norm(x @ w["q_down.weight"].T, w["q_norm.weight"], eps)
    q = (read @ w["q_up.weight"].T).unflatten(-1, (H, nope + rope))
    down = x @ w["kv_down.weight"].T
    c = rms_norm(down[..., :rank], w["kv_norm.weight"], eps)
    up = (c @ w["kv_up.weight"].T).unflatten(-1, (H, nope + value))
    k = torch.stack([torch.cat([up[:, :, h, :nope], down[..., rank:]], dim=-1) for h in range(H)], dim=2)
    if model["position"]["kind"] == "rotary":
        theta = model["position"]["theta"]  # a share of its own is `rope_width`
        for y in (q, k):
            for h in range(H):
                y[:, :, h, nope:] = turned(y[:, :, h, nope:].clone(), times, theta)
    return q, k, up[..., nope:]


def added(
    bias: Config, own: Weights, h: int, g: int, width: int, d: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The key and value, or the logit and its value zero, that a bias adds to the row of query head h, key head g."""
    zero = like.new_zeros(d)
    if bias["kind"] == "sink_logit":
        return None, zero, own["attention.core.bias.logit"][h]
    if bias["kind"] == "off_by_one":
        return None, zero, like.new_zeros(())
    if bias["kind"] not in ("k", "kv"):
        return None, None, None
    which = 0 if bias["shared"] else g
    learned = own["attention.core.bias.key"][which]
    key = torch.cat([learned, like.new_zeros(width - len(learned))])
    if bias["kind"] == "kv":
        return key, own["attention.core.bias.value"][which], None
    value = zero.clone()
    if bias["value"] != "zero":
        if bias["value"]["direction"] == "first":
            value[0] = bias["value"]["norm"]
        else:
            value[:] = bias["value"]["norm"] / math.sqrt(d)
    return key, value, None


class Row(NamedTuple):
    """All rows of one head: from queries (B, L, d) and keys (B, L, d), a bias key after them, to A (B, L, S)."""

    model: Config
    own: Weights
    head: int
    key_head: int
    times: Tensor
    visible: Tensor
    fading: Tensor
    has_key: bool
    logit: Tensor | None

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = self._prepared(q, k)
        operation = self.model["attention"]["operation"] | {"context": self.model["context"]}
        seen = self._seen()
        if operation["kind"] in ("elu_kernel", "identity", "mlp"):
            return kernel(operation, self.own, q, k, seen)
        if operation["kind"] == "threshold_rectified":
            return above_threshold(operation, self._scores(q, k, cosine=True), seen, q.shape[-1])
        return of_scores(operation, self.own, self.head, self._scores(q, k), seen)

    def differential(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        """softmax(z1) - lambda softmax(z2): each half of q and k is a head of its own."""
        learned = {n: self.own[f"attention.core.learned.{n}"] for n in ("q1", "k1", "q2", "k2")}
        weight = (
            torch.exp(learned["q1"] @ learned["k1"])
            - torch.exp(learned["q2"] @ learned["k2"])
            + lambda_init(self.model["attention"]["operation"], layer)
        )
        half, seen = q.shape[-1] // 2, self._seen()
        first = self._scores(*self._prepared(q[..., :half], k[..., :half]))
        second = self._scores(*self._prepared(q[..., half:], k[..., half:], second=True))
        return softmax(first, seen) - weight * softmax(second, seen)

    def threshold_differential(self, q: Tensor, k: Tensor) -> Tensor:
        """relu(cos1 - tau)^p - lambda relu(cos2 - tau)^p, of the halves of q and k."""
        operation, half, parts = self.model["attention"]["operation"], q.shape[-1] // 2, []
        for second, part in enumerate((slice(0, half), slice(half, None))):
            z = self._scores(*self._prepared(q[..., part], k[..., part], second=bool(second)), cosine=True)
            parts.append(above_threshold(operation, z, self._seen(), half))
        return parts[0] - self.own["attention.core.learned.weight"].clamp(0, 1) * parts[1]

    def differential_v2(self, q1: Tensor, q2: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """softmax(z1) - sigmoid(w.x) softmax(z2): two query heads on one key head."""
        weight = torch.sigmoid(x @ self.own["attention.weight_gate.weight"][self.head]).unsqueeze(-1)
        seen = self._seen()
        first, second = self._scores(*self._prepared(q1, k)), self._scores(*self._prepared(q2, k, second=True))
        return softmax(first, seen) - weight * softmax(second, seen)

    def _prepared(self, q: Tensor, k: Tensor, second: bool = False) -> tuple[Tensor, Tensor]:
        """qk_norm, then rotary; a bias key is unchanged. Halves of a head are separate heads."""
        L = len(self.times)
        own_keys = k[:, :L]
        if how := self.model["norm"]["qk_norm"]:
            eps, kind = self.model["norm"]["eps"], self.model["attention"]["operation"]["kind"]
            halves = kind in ("differential", "threshold_differential")
            queries = 2 if halves or kind == "differential_v2" else 1
            keys, second_key = (2, second) if halves else (1, 0)
            H, G = self.model["heads"], self.model["kv_heads"] or self.model["heads"]
            w_q = of_head(self.own["attention.q_norm.weight"], how, queries * self.head + second, queries * H)
            w_k = of_head(self.own["attention.k_norm.weight"], how, keys * self.key_head + second_key, keys * G)
            q, own_keys = rms_norm(q, w_q, eps), rms_norm(own_keys, w_k, eps)
        if self.model["position"]["kind"] == "rotary" and self.model["projection"]["kind"] == "full":
            theta, n = self.model["position"]["theta"], round(self.model["position"]["share"] * q.shape[-1])
            q, own_keys = (
                torch.cat([turned(x[..., :n], self.times, theta), x[..., n:]], dim=-1) for x in (q, own_keys)
            )
        return q, torch.cat([own_keys, k[:, L:]], dim=1)

    def _seen(self) -> Tensor:
        if not self.has_key and self.logit is None:
            return self.visible
        return F.pad(self.visible, (0, 1), value=True)

    def _scores(self, q: Tensor, k: Tensor, cosine: bool = False) -> Tensor:
        """z (B, L, S): scaled, capped, then with the terms of positions for tokens and the offset b for a bias key."""
        lengths = q.norm(dim=-1).unsqueeze(-1) * k.norm(dim=-1).unsqueeze(-2)
        lengths = torch.where(lengths > 0, lengths, 1.0)
        z = q @ k.transpose(1, 2) / (lengths if cosine else math.sqrt(q.shape[-1]))
        cap = self.model["attention"]["softcap"]
        if cap is not None:
            z = cap * torch.tanh(z / cap)
        L = len(self.times)
        added = self.own.get("attention.core.bias.offset")
        of_bias = z[..., L:] if added is None else z[..., L:] + added[self.head]
        z = torch.cat([z[..., :L] + self._position_term() + self.fading, of_bias], dim=-1)
        if self.logit is not None:
            z = torch.cat([z, self.logit.expand(*z.shape[:2], 1)], dim=-1)
        return z

    def _position_term(self) -> Tensor:
        position, L = self.model["position"], len(self.times)
        term = torch.zeros(L, L, dtype=torch.float64)
        if position["kind"] not in ("relative", "t5", "alibi"):
            return term
        rows = []
        for t in self.times.tolist():
            if position["kind"] == "alibi":
                rows.append(-slopes(self.model["heads"])[self.head] * (t - self.times.double()).abs())
                continue
            buckets = torch.tensor([bucket(max(t - s, 0), position) for s in self.times.tolist()])
            rows.append(buckets if position["kind"] == "relative" else self.own["distance.weight"][buckets, self.head])
        return term + torch.stack(rows)


def of_head(weight: Tensor, how: bool | str, head: int, heads: int) -> Tensor:
    """The weight of a norm of heads for one of them, from 0."""
    return weight.chunk(heads)[head] if how == "per_head" else weight


def faded(own: Weights, head: int, x: Tensor) -> Tensor:
    """The sum of log f_l over the positions l after key s up to query t, 0 where there are none: (B, L, L)."""
    w, b = own["attention.forget_gate.weight"][head], own["attention.forget_gate.bias"][head]
    log_f, L = torch.log(torch.sigmoid(x @ w + b)), x.shape[1]
    sums = [[log_f[:, s + 1 : t + 1].sum(1) for s in range(L)] for t in range(L)]
    return torch.stack([torch.stack(row, dim=1) for row in sums], dim=1)


def turned(x: Tensor, times: Tensor, theta: float) -> Tensor:
    """The pair (x_i, x_{i + n/2}) by the angle t theta^(-2i/n), n the width of x."""
    n = x.shape[-1]
    i = torch.arange(n // 2, dtype=torch.float64)
    angle = times.double()[:, None] * theta ** (-2 * i / n)
    left, right = x[..., : n // 2], x[..., n // 2 :]
    return torch.cat(
        [left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()],
        dim=-1,
    )


def bucket(distance: int, position: Config) -> int:
    """The number that T5 gives a distance to an earlier key (1910.10683), the floor of its logarithm in whole numbers.

    m ln(n / e) / ln(M / e) >= j where n^m e^j >= M^j e^m: e single distances, m buckets for those from e up to M.
    """
    e, M = position["buckets"] // 2, position["max_distance"]
    m = position["buckets"] - e
    if distance < e:
        return distance
    return e + max(j for j in range(m) if distance**m * e**j >= M**j * e**m)


def slopes(heads: int) -> list[float]:
    """ALiBi's, as its source has them for numbers of heads that are no power of two (2108.12409)."""
    below = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    between = [2 ** (-8 * h / (2 * below)) for h in range(1, 2 * below + 1)][0::2]
    return first + between[: heads - below]


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def of_scores(operation: Config, own: Weights, head: int, z: Tensor, seen: Tensor) -> Tensor:
    """A (B, L, S) from the scores, for every operation that depends on the scores alone."""
    kind = operation["kind"]
    if kind == "softmax":
        p = operation["p"]
        norms = torch.logsumexp((p * z).masked_fill(~seen, -math.inf), dim=-1, keepdim=True) / p
        return operation["alpha"] * torch.exp(z.masked_fill(~seen, -math.inf) - norms)
    if kind == "forgetting":
        return softmax(z, seen)
    if kind == "stick_breaking":
        return sticks(z, seen)
    if kind == "scalable_softmax":
        factor = own["attention.core.learned.scale"][head] * torch.log(seen.sum(-1, keepdim=True).double())
        if operation["offset"] is not None:
            factor = factor + own["attention.core.learned.offset"][head]
        return softmax(factor * z, seen)
    if kind == "sigmoid":
        z = z + sigmoid_shift(operation, own, head, seen)
    if kind in ("sigmoid", "elu1", "relu"):
        sim = {
            "sigmoid": torch.sigmoid,
            "elu1": lambda y: torch.where(y > 0, y + 1, torch.exp(y.clamp(max=0))),
            "relu": lambda y: y.clamp(min=0),
        }[kind](z)
        sim = torch.where(seen, sim, 0.0)
        return p_normalised(sim, operation["p"]) if operation["normalised"] else sim
    if kind == "clipped_softmax":
        stretched = (operation["zeta"] - operation["gamma"]) * softmax(z, seen) + operation["gamma"]
        return torch.where(seen, stretched.clamp(0, 1), 0.0)
    if kind == "softpick":
        excess = torch.where(seen, torch.exp(z) - 1, 0.0)
        return excess.clamp(min=0) / (excess.abs().sum(-1, keepdim=True) + operation["eps"])
    if kind == "entmax15":
        return entmax15(z, seen)
    assert kind == "elastic_softmax"
    count = seen.sum(-1, keepdim=True)
    lifted = softmax(z, seen) + own["attention.core.learned.tau"][head] / count
    return torch.where(seen, lifted.clamp(min=0), 0.0)


def above_threshold(operation: Config, z: Tensor, seen: Tensor, d: int) -> Tensor:
    """relu(z - tau)^p with tau = beta sqrt(2 log n / d), n the keys of the row and d the width of a key."""
    tau = operation["beta"] * torch.sqrt(2 * torch.log(seen.sum(-1, keepdim=True).double()) / d)
    return torch.where(seen & (z > tau), (z - tau).clamp(min=0) ** operation["power"], 0.0)


def entmax15(z: Tensor, seen: Tensor) -> Tensor:
    """relu(z / 2 - tau)^2 of the visible keys: tau by halving, then from the keys above it, with its gradient."""
    half = (z / 2).masked_fill(~seen, -math.inf)
    high = half.detach().amax(-1, keepdim=True)
    low = high - 1
    for _ in range(100):
        middle = (low + high) / 2
        above_one = (half.detach() - middle).clamp(min=0).square().sum(-1, keepdim=True) > 1
        low, high = torch.where(above_one, middle, low), torch.where(above_one, high, middle)
    kept = half.detach() > high
    n, chosen = kept.sum(-1, keepdim=True), torch.where(kept, z / 2, 0.0)
    mean = chosen.sum(-1, keepdim=True) / n  # n tau^2 - 2 n mean tau + sum of squares = 1
    root = torch.sqrt(mean**2 - ((chosen**2).sum(-1, keepdim=True) - 1) / n)
    return torch.where(kept, chosen - (mean - root), 0.0) ** 2


def sticks(z: Tensor, seen: Tensor) -> Tensor:
    """Shares of the keys before the query, from the latest to the first; the last column is the rest of the row."""
    rows = []
    for t in range(z.shape[1]):
        left, row = torch.ones_like(z[:, t, 0]), {}
        for s in reversed(range(z.shape[-1])):
            sees = seen.expand(len(z), -1, -1)[:, t, s] & (s != t)
            row[s] = torch.where(sees, left * torch.sigmoid(z[:, t, s]), 0.0)
            left = torch.where(sees, left * torch.sigmoid(-z[:, t, s]), left)
        rows.append(torch.stack([*(row[s] for s in range(z.shape[-1])), left], dim=-1))
    return torch.stack(rows, dim=1)


def sigmoid_shift(operation: Config, own: Weights, head: int, seen: Tensor) -> Tensor | float:
    """b of sigmoid(z + b): a number, or one of every row."""
    if operation["shift"] == "row":
        return -torch.log(seen.sum(-1, keepdim=True).double())
    if operation["shift"] == "learned":
        return own["attention.core.learned.shift"][head] - math.log(operation["context"])
    return -math.log(operation["context"]) if operation["shift"] == "context" else 0.0


def softmax(z: Tensor, seen: Tensor) -> Tensor:
    return torch.softmax(z.masked_fill(~seen, -math.inf), dim=-1)


def p_normalised(sim: Tensor, p: float) -> Tensor:
    """sim / (sum sim^p)^(1/p); a row without anything is zero."""
    powers = torch.where(sim > 0, torch.where(sim > 0, sim, 1.0) ** p, 0.0).sum(-1, keepdim=True)
    return torch.where(powers > 0, sim / torch.where(powers > 0, powers, 1.0) ** (1 / p), 0.0)


def kernel(operation: Config, own: Weights, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """phi(q).phi(k) / sqrt(d), over its row sum (elu) or max(|row sum|, 1) where normalised."""
    if operation["kind"] == "elu_kernel":
        q, k = (F.elu(x) + 1 for x in (q, k))
    if operation["kind"] == "mlp":
        inner, outer = (own[f"attention.core.learned.{n}.weight"] for n in ("inner", "outer"))
        q, k = ((x @ inner.T).clamp(min=0) @ outer.T for x in (q, k))
    sim = torch.where(seen, q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), 0.0)
    if not operation["normalised"]:
        return sim
    sums = sim.sum(-1, keepdim=True)
    return sim / (sums if operation["kind"] == "elu_kernel" else sums.abs().clamp(min=1))


def lambda_init(operation: Config, layer: int) -> float:
    given = operation["lambda_init"]
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1)) if given == "depth" else given
