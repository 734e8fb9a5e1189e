"""The compared mechanisms from their published formulas, entry by entry; nothing of linvit is called here.

Every function takes a layer (its parameters alone are read), tokens x (batch, prefix + height × width, channels) and
the grid, and returns what stands before the layer's projections: (batch, tokens, channels), float64; where there are
two projections, as in ViT³, what both read side by side.
"""

import math

import torch
from torch import Tensor


def query_key_value(layer, x: Tensor) -> list[Tensor]:
    """Each (batch, tokens, channels)."""
    return list((torch.einsum("btc,oc->bto", x, layer.qkv.weight) + layer.qkv.bias).chunk(3, dim=-1))


def by_head(layer, x: Tensor) -> list[Tensor]:
    """One tensor (batch, tokens, width) a head."""
    return list(x.chunk(layer.heads, dim=-1))


def elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def over_heads(layer, x: Tensor, one_head) -> Tensor:
    """one_head(q, k, v, scale) for every head, joined."""
    parts = zip(*(by_head(layer, part) for part in query_key_value(layer, x)), strict=True)
    return torch.cat([one_head(q, k, v, q.shape[-1] ** -0.5) for q, k, v in parts], dim=-1)


def shifted(grid_values: Tensor, down: int, right: int) -> Tensor:
    """Entry (i, j) is that of (i + down, j + right), zero outside; (batch, height, width, channels)."""
    _, height, width, _ = grid_values.shape
    out = torch.zeros_like(grid_values)
    for i in range(height):
        for j in range(width):
            if 0 <= i + down < height and 0 <= j + right < width:
                out[:, i, j] = grid_values[:, i + down, j + right]
    return out


def local(value: Tensor, weight: Tensor, bias: Tensor | float, grid, num_prefix: int) -> Tensor:
    """Depthwise convolution of the tokens behind the prefix; weight (channels or batch × channels, side, side)."""
    batch, _, channels = value.shape
    as_map = value[:, num_prefix:].reshape(batch, *grid, channels)
    side = weight.shape[-1]
    taps = weight.reshape(-1, channels, side, side)  # one set of taps for all images, or one an image
    out = torch.zeros_like(as_map)
    for dy in range(side):
        for dx in range(side):
            out = out + taps[:, None, None, :, dy, dx] * shifted(as_map, dy - side // 2, dx - side // 2)
    out = (out + bias).reshape(batch, -1, channels)
    return torch.cat((torch.zeros_like(value[:, :num_prefix]), out), dim=1)


def turned(x: Tensor, grid, num_prefix: int, frequencies: Tensor) -> Tensor:
    """Pairs of channels as complex numbers, times e^(i·row·f) in the first half and e^(i·column·f) in the second."""
    height, width = grid
    rows = torch.arange(height, dtype=torch.float64).repeat_interleave(width)
    columns = torch.arange(width, dtype=torch.float64).repeat(height)
    angles = torch.cat((rows[:, None] * frequencies, columns[:, None] * frequencies), dim=-1)
    angles = torch.cat((torch.zeros(num_prefix, angles.shape[-1]), angles))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def softmax(layer, x, grid):
    return over_heads(layer, x, lambda q, k, v, s: (s * q @ k.mT).softmax(-1) @ v)


def softmax_unit_query(layer, x, grid):
    """MALA, Table 1: the query divided by its norm; the scale 1/√width does not shrink it then."""
    return over_heads(layer, x, lambda q, k, v, s: (q / q.norm(dim=-1, keepdim=True) @ k.mT).softmax(-1) @ v)


def vanilla(kappa):
    def attend(layer, x, grid):
        def one_head(q, k, v, s):
            similar = kappa(q) @ kappa(k).mT
            return similar @ v / (similar.sum(-1, keepdim=True) + 1e-6 * k.shape[1])

        return over_heads(layer, x, one_head)

    return attend


def hydra(layer, x, grid):
    q, k, v = query_key_value(layer, x)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    return q * (k * v).sum(1, keepdim=True)


def efficient(layer, x, grid):
    return over_heads(layer, x, lambda q, k, v, s: q.softmax(-1) @ (k.softmax(1).mT @ v))


def linear_angular(layer, x, grid):
    def one_head(q, k, v, s):
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        y = 0.5 * v + (q @ k.mT) @ v / math.pi
        return y / y.norm(dim=-1, keepdim=True)

    _, _, v = query_key_value(layer, x)
    tokens = x.shape[1]
    neighbours = []
    for head, value in enumerate(by_head(layer, v)):
        rows = [
            sum(layer.dconv.weight[head, 0, s, 0] * value[:, t + s - 4] for s in range(9) if 0 <= t + s - 4 < tokens)
            for t in range(tokens)
        ]
        neighbours.append(torch.stack(rows, dim=1))
    return over_heads(layer, x, one_head) + torch.cat(neighbours, dim=-1)


def focused(layer, x, grid):
    q, k, v = query_key_value(layer, x)
    prefix = torch.zeros(1, layer.num_prefix, x.shape[-1])
    k = k + torch.cat((prefix, layer.positional_encoding), dim=1)
    temperature = (1 + layer.scale.exp()).log()

    def sharpened(y):
        y = (y.clamp(min=0) + 1e-6) / temperature
        return y**3 * (y.norm(dim=-1, keepdim=True) / (y**3).norm(dim=-1, keepdim=True))

    heads = zip(*(by_head(layer, part) for part in (sharpened(q), sharpened(k), v)), strict=True)
    out = []
    for q_head, k_head, v_head in heads:
        similar = q_head @ k_head.mT / k.shape[1]
        read = similar @ v_head / (similar.sum(-1, keepdim=True) + 1e-6)
        out.append(read + local(v_head, layer.dwc.weight[:, 0], layer.dwc.bias, grid, layer.num_prefix))
    return torch.cat(out, dim=-1)


def inline(layer, x, grid):
    def one_head(q, k, v, s):
        similar = s * q @ k.mT / k.shape[1]
        return (similar + (1 - similar.sum(-1, keepdim=True)) / k.shape[1]) @ v

    _, _, v = query_key_value(layer, x)
    mean, first, second = x.mean(1), layer.residual[0], layer.residual[2]
    hidden = [
        m @ w[..., 0].T for m, w in zip(mean.chunk(layer.heads, -1), first.weight.chunk(layer.heads), strict=True)
    ]
    hidden = torch.cat(hidden, dim=-1) + first.bias
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    taps = [
        m @ w[..., 0].T for m, w in zip(hidden.chunk(layer.heads, -1), second.weight.chunk(layer.heads), strict=True)
    ]
    taps = (torch.cat(taps, dim=-1) + second.bias).reshape(-1, 3, 3)
    return over_heads(layer, x, one_head) + local(v, taps, 0.0, grid, layer.num_prefix)


def mlla(layer, x, grid):
    q, k, v = query_key_value(layer, x)
    q, k = elu1(q), elu1(k)
    pairs = x.shape[-1] // 4
    frequencies = 10000 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    parts = (turned(q, grid, layer.num_prefix, frequencies), turned(k, grid, layer.num_prefix, frequencies), q, k, v)
    out = []
    for rotated_q, rotated_k, q_head, k_head, v_head in zip(*(by_head(layer, part) for part in parts), strict=True):
        mass = (q_head @ k_head.mT).mean(-1, keepdim=True) + 1e-6
        out.append((rotated_q @ rotated_k.mT / k.shape[1]) @ v_head / mass)
    return torch.cat(out, dim=-1) + local(v, layer.lepe.weight[:, 0], layer.lepe.bias, grid, layer.num_prefix)


def agent(layer, x, grid):
    """The grid must be that for which the layer was made, and a multiple of the agents' or 7 × 7 biases as they are."""
    _, _, v = query_key_value(layer, x)
    prefix, (height, width), (rows, columns) = layer.num_prefix, grid, layer.agents

    def biases(head):
        block = torch.nn.functional.interpolate(layer.an_bias[head][None], grid, mode="bilinear")[0].flatten(1)
        edges = (layer.ah_bias[0, head] + layer.aw_bias[0, head]).flatten(1)
        back = torch.nn.functional.interpolate(layer.na_bias[head][None], grid, mode="bilinear")[0].flatten(1).T
        back = back + (layer.ha_bias[0, head] + layer.wa_bias[0, head]).flatten(0, 1)
        if prefix == 0:
            return block + edges, back
        return torch.cat((layer.ac_bias[0, head], block + edges), 1), torch.cat((layer.ca_bias[0, head], back))

    heads = zip(*(by_head(layer, part) for part in query_key_value(layer, x)), strict=True)
    out = []
    for head, (q, k, v_head) in enumerate(heads):
        as_map, s = q[:, prefix:].reshape(x.shape[0], height, width, -1), q.shape[-1] ** -0.5
        agents = [
            as_map[
                :,
                i * height // rows : -(-(i + 1) * height // rows),
                j * width // columns : -(-(j + 1) * width // columns),
            ].mean((1, 2))
            for i in range(rows)
            for j in range(columns)
        ]
        agents = torch.stack(agents, dim=1)
        to_agents, to_tokens = biases(head)
        gathered = (s * agents @ k.mT + to_agents).softmax(-1) @ v_head
        out.append((s * q @ agents.mT + to_tokens).softmax(-1) @ gathered)
    return torch.cat(out, dim=-1) + local(v, layer.dwc.weight[:, 0], layer.dwc.bias, grid, prefix)


def gated(weigh, read):
    """RALA's and MALA's surroundings; weigh gives α from κ(q), κ(k) and s, read the scores."""

    def attend(layer, x, grid):
        q, k, v = query_key_value(layer, x)
        pairs = x.shape[-1] // layer.heads // 4
        frequencies = 10000 ** -torch.linspace(0, 1, pairs, dtype=torch.float64)
        out = []
        for q_head, k_head, v_head in zip(*(by_head(layer, part) for part in (elu1(q), elu1(k), v)), strict=True):
            s = q_head.shape[-1] ** -0.5
            alpha = weigh(q_head, k_head, s)
            num = (
                turned(q_head, grid, layer.num_prefix, frequencies)
                @ turned(k_head, grid, layer.num_prefix, frequencies).mT
            )
            den = (alpha * (q_head @ k_head.mT)).sum(-1, keepdim=True)
            out.append((alpha * read(num, den, s)) @ v_head)
        out = torch.cat(out, dim=-1) + local(v, layer.lepe.weight[:, 0], layer.lepe.bias, grid, layer.num_prefix)
        return out * (x @ layer.modulation.weight.T + layer.modulation.bias)

    return attend


def gate(layer, x: Tensor) -> Tensor:
    return x @ layer.modulation.weight.T + layer.modulation.bias


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def divided_by_mass(num: Tensor, den: Tensor) -> Tensor:
    return num / (den.sum(-1, keepdim=True) + 1e-6 * den.shape[-1])


def polaformer(layer, x, grid):
    """Scores of equal and of opposite signs, each for one half of the values of a head."""
    q, k, v = query_key_value(layer, x)
    temperature, power = (1 + layer.scale.exp()).log(), 1 + 4 * sigmoid(layer.power)
    prefix = torch.zeros(1, layer.num_prefix, x.shape[-1])
    q, k = q / temperature, (k + torch.cat((prefix, layer.positional_encoding), dim=1)) / temperature

    def signs(y):
        return (torch.where(sign * y > 0, sign * y, torch.zeros_like(y)) ** power for sign in (1, -1))

    q_plus, q_minus, k_plus, k_minus = (by_head(layer, y) for y in (*signs(q), *signs(k)))
    out = []
    for head, value in enumerate(by_head(layer, v)):
        equal = q_plus[head] @ k_plus[head].mT + q_minus[head] @ k_minus[head].mT
        opposite = q_plus[head] @ k_minus[head].mT + q_minus[head] @ k_plus[head].mT
        halves = zip((equal, opposite), value.chunk(2, dim=-1), strict=True)
        read = torch.cat([divided_by_mass(similar @ half, similar) for similar, half in halves], dim=-1)
        out.append(read + local(value, layer.dwc.weight[:, 0], layer.dwc.bias, grid, layer.num_prefix))
    return torch.cat(out, dim=-1) * gate(layer, x)


def polaformer_pp(layer, x, grid):
    q, k, v = query_key_value(layer, x)
    half = x.shape[-1] // layer.heads
    frequencies = 10000 ** -torch.linspace(0, 1, half // 2, dtype=torch.float64)

    def grown(plus, minus):
        return torch.cat((plus.clamp(min=0), minus.clamp(min=0)), dim=-1)

    def turn(y):
        return turned(y, grid, layer.num_prefix, frequencies)

    out = []
    for head, (q_head, k_head, value) in enumerate(zip(*(by_head(layer, y) for y in (q, k, v)), strict=True)):
        key = grown(k_head, -k_head).exp() - 1
        equal, opposite = (sigmoid(s) for s in layer.sharpness[head])
        queries = (equal * grown(q_head, -q_head)).exp() - 1, (opposite * grown(-q_head, q_head)).exp() - 1
        for query, part in zip(queries, value.chunk(2, dim=-1), strict=True):
            out.append(divided_by_mass(turn(query) @ turn(key).mT @ part, query @ key.mT))
    out = torch.cat(out, dim=-1) + local(v, layer.lepe.weight[:, 0], layer.lepe.bias, grid, layer.num_prefix)
    return out * gate(layer, x)


def nala(layer, x, grid):
    q, k, v = query_key_value(layer, x)
    frequencies = 10000 ** -torch.linspace(0, 1, x.shape[-1] // layer.heads // 4, dtype=torch.float64)
    out = []
    for q_head, k_head, value in zip(*(by_head(layer, y) for y in (q, k, v)), strict=True):
        norm = q_head.norm(dim=-1, keepdim=True)
        power = 3 * (0.5 + norm.tanh())
        queries = [((sign * q_head).clamp(min=0) / norm) ** power for sign in (1, -1)]
        keys = [(sign * k_head).clamp(min=0) ** 3 for sign in (1, -1)]
        pairs = list(zip(queries, keys, strict=True))
        num = sum(
            turned(a, grid, layer.num_prefix, frequencies) @ turned(b, grid, layer.num_prefix, frequencies).mT
            for a, b in pairs
        )
        out.append(divided_by_mass(num @ value, sum(a @ b.mT for a, b in pairs)))
    out = torch.cat(out, dim=-1) + local(v, layer.lepe.weight[:, 0], layer.lepe.bias, grid, layer.num_prefix)
    mean, variance = out.mean(-1, keepdim=True), out.var(-1, keepdim=True, correction=0)
    normed = (out - mean) / (variance + 1e-5).sqrt() * layer.ln.weight + layer.ln.bias
    return normed * gate(layer, x) * sigmoid(gate(layer, x))


def recnext(layer, x, grid):
    """In evaluation, at the full size of the map."""
    q, k, v = query_key_value(layer, x)
    norm = layer.qk_norm
    qk = (torch.cat((q, k), dim=-1) - norm.running_mean) / (norm.running_var + 1e-5).sqrt() * norm.weight + norm.bias
    q, k = elu1(qk).chunk(2, dim=-1)
    out = []
    for q_head, k_head, value in zip(*(by_head(layer, y) for y in (q, k, v)), strict=True):
        similar = q_head @ k_head.mT
        out.append(divided_by_mass(similar @ value, similar))
    conv, norm = layer.lepe
    factor = norm.weight / (norm.running_var + 1e-5).sqrt()
    taps, shift = conv.weight[:, 0] * factor[:, None, None], norm.bias - norm.running_mean * factor
    return torch.cat(out, dim=-1) + local(v, taps, shift, grid, layer.num_prefix)


def vittt(layer, x, grid):
    """Gradients by automatic differentiation of the loss; the second branch is projected with the first."""

    def inner(loss, weights):
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        return [w - g / (1 + g.norm(dim=-2, keepdim=True)) for w, g in zip(weights, gradients, strict=True)]

    def silu(y):
        return y * sigmoid(y)

    q, k, v = query_key_value(layer, x)
    images = []
    for image in range(len(x)):
        heads = []
        for head, (q_head, k_head, value) in enumerate(
            zip(*(by_head(layer, y[image]) for y in (q, k, v)), strict=True)
        ):
            w1, w2 = (w[head].detach().clone().requires_grad_() for w in (layer.operator.w1, layer.operator.w2))
            made = (k_head @ w1) * silu(k_head @ w2)
            w1, w2 = inner(-(made * value).sum() / 3 / len(value), [w1, w2])
            heads.append((q_head @ w1) * silu(q_head @ w2))
        images.append(torch.cat(heads, dim=-1))
    second = x[:, layer.num_prefix :] @ layer.local_qkv.weight.T + layer.local_qkv.bias
    q, k, v = second.chunk(3, dim=-1)
    rows = []
    for image in range(len(x)):
        taps = layer.w3.flatten(1).T.detach().clone().requires_grad_()  # (9, channels), so that columns are kernels

        def convolved(y, taps, image=image):
            return local(y[image : image + 1], taps.T.unflatten(-1, (3, 3)), 0.0, grid, 0)[0]

        (taps,) = inner(-(convolved(k, taps) * v[image]).sum() / 3 / v.shape[1], [taps])
        rows.append(convolved(q, taps))
    prefix = torch.zeros(len(x), layer.num_prefix, v.shape[-1])
    return torch.cat((torch.stack(images), torch.cat((prefix, torch.stack(rows)), dim=1)), dim=-1)


def mhla(layer, x, grid):
    """Scores of a query's block over all blocks, tokens before the grid being the first."""
    norm, (height, width), (rows, columns) = layer.input_norm, grid, layer.operator.blocks
    y = x - x.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias
    q, k, v = query_key_value(layer, y)
    q, k = (
        z / (z.square().mean(-1, keepdim=True) + torch.finfo(z.dtype).eps).sqrt() * rms.weight
        for z, rms in ((q, layer.query_norm), (k, layer.key_norm))
    )

    def block(place, length, count):
        return max(i for i in range(count) if i * length // count <= place)

    prefix = layer.num_prefix
    numbers = [0] * prefix + [
        bool(prefix) + block(i, height, rows) * columns + block(j, width, columns)
        for i in range(height)
        for j in range(width)
    ]
    shares = layer.operator.mixing.clamp(0, 1)
    out = []
    for q_head, k_head, v_head in zip(*(by_head(layer, z) for z in (q, k, v)), strict=True):
        similar = (q_head.clamp(min=0) + 1e-6) @ (k_head.clamp(min=0) + 1e-6).mT
        shared = similar * torch.stack([torch.stack([shares[i, j] for j in numbers]) for i in numbers])
        weights = torch.stack([torch.stack([shares[i, j] for j in numbers]).sum() for i in numbers])
        out.append(shared @ v_head / (shared.sum(-1, keepdim=True) + 1e-6 * weights[:, None]))
    return torch.cat(out, dim=-1) + local(v, layer.lepe.weight[:, 0], layer.lepe.bias, grid, layer.num_prefix)


def uniform(q, k, s):
    return torch.full((1, 1, k.shape[1]), 1 / k.shape[1])


def query_mean(q, k, s):
    return (s * q.mean(1, keepdim=True) @ k.mT).softmax(-1)


def divided(num, den, s):
    return num / (den + 1e-6)


def with_magnitude(num, den, s):
    return s * num * (1 + 1 / (s * den + 1e-6)) - s * den


WRITTEN_OUT = {
    "softmax": softmax,
    "softmax_unit_query": softmax_unit_query,
    "linear": vanilla(elu1),
    "linear_relu": vanilla(lambda x: x.clamp(min=0)),
    "linear_exp": vanilla(torch.exp),
    "hydra": hydra,
    "efficient": efficient,
    "linear_angular": linear_angular,
    "enhanced": vanilla(lambda x: x.clamp(min=0)),
    "focused": focused,
    "inline": inline,
    "mlla": mlla,
    "agent": agent,
    "polaformer": polaformer,
    "mhla": mhla,
    "polaformer_pp": polaformer_pp,
    "nala": nala,
    "recnext": recnext,
    "vittt": vittt,
    "rala": gated(query_mean, divided),
    "mala": gated(uniform, with_magnitude),
    "rala_mala": gated(query_mean, with_magnitude),
}
