"""Functions that are traced: feature maps and normalizers, with their learned tensors, and what torch says of them."""

from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from linvit.formulas.feature_map import ACROSS_TOKENS, FEATURE_MAPS
from linvit.formulas.normalizer import NORMALIZERS
from linvit.formulas.trace import trace_map, trace_normalizer
from linvit.layers.mechanisms import LINEAR_AXES
from linvit.ops import linear_attention

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 7, 17


class Example(NamedTuple):
    """A function, shapes of its learned tensors, and its largest exponent of e, whose error is the result's."""

    function: object
    learned: dict = MappingProxyType({})
    exponent: float = 1

    def tensors(self, learning=False):
        generator = torch.Generator().manual_seed(1)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in self.learned.items()}
        return {name: x.requires_grad_(learning) for name, x in tensors.items()}

    def holding(self, tensors):
        return partial(self.function, **tensors)


def directions(x, temperature, offset):
    """Each channel's share of the norm, to a power that grows with the norm (as NaLaFormer's queries)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    power = 3 * (0.5 + torch.tanh(norm * temperature))
    return (F.relu(x) / (norm + 1e-6)) ** power + offset.sigmoid()


def straight_through(x):
    """The sign of x whose derivative is taken to be that of tanh."""
    smooth = x.tanh()
    return smooth + (x.sign() - smooth).detach()


ELEMENTWISE = {
    **{name: Example(FEATURE_MAPS[name]) for name in ("elu1", "relu", "exp", "identity", "relu_cubed", "relu_expm1")},
    "elu": Example(lambda x: F.elu(x) + 1),
    "celu": Example(lambda x: F.celu(x, alpha=1.5)),
    "selu": Example(F.selu),
    "silu": Example(F.silu),
    "gelu": Example(F.gelu),
    "gelu tanh": Example(partial(F.gelu, approximate="tanh")),
    "softplus": Example(F.softplus),
    "mish": Example(F.mish),
    "sigmoid": Example(torch.sigmoid),
    "leaky": Example(lambda x: F.leaky_relu(x, 0.1)),
    "clamped": Example(lambda x: x.clamp(-0.7, 1.1) ** 2),
    "cosine": Example(lambda x: x.cos() + (x * 0.5).sin() * 0.3),
    "expm1": Example(lambda x: (x.abs() * 0.01).expm1() * 100),
    "log1p": Example(lambda x: (x * x * 1e-3).log1p() * 1e3),
    "powers": Example(lambda x: x**3 - x**2 / 2 + (x.abs() + 0.1) ** -0.5 + F.relu(x) ** 1.7),
    "signed power": Example(lambda x: x.sign() * (x.abs() + 0.01).sqrt()),
    "where": Example(lambda x: torch.where((x > 0.2) & ~(x > 1), x.square(), torch.full_like(x, 0.5)) * (x < 2)),
    "in place": Example(lambda x: (x * 2).add_(1).relu_()),
    "straight through": Example(straight_through),
}
REDUCING = {
    "unit": Example(FEATURE_MAPS["unit"]),
    "softmax": Example(FEATURE_MAPS["softmax"]),
    "norm_power": Example(FEATURE_MAPS["norm_power"]),
    "log softmax": Example(lambda x: x.log_softmax(-1)),
    "centred": Example(lambda x: x - x.mean(-1, keepdim=True)),
    "spread": Example(lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, True) + 1)),
    "l1": Example(lambda x: F.normalize(F.relu(x) + 0.1, p=1, dim=-1)),
    "cubic norm": Example(lambda x: F.normalize(F.relu(x) + 0.1, p=3, dim=-1)),
    "without its axis": Example(lambda x: x * x.square().sum(-1).rsqrt().unsqueeze(-1)),
    "moved": Example(lambda x: (x.transpose(1, 2).exp() / x.transpose(1, 2).exp().sum(-1, True)).transpose(1, 2)),
    "layer norm": Example(lambda x: F.layer_norm(x, x.shape[-1:])),
    "hedgehog": Example(lambda x: (x * x.shape[-1] ** -0.5).softmax(-1) + (-x).softmax(-1)),
}
LEARNED = {
    "temperature": Example(lambda x, t: (x / F.softplus(t)).exp(), {"t": ()}),
    "by head": Example(lambda x, t: F.elu(x * t) + 1, {"t": (HEADS, 1, 1)}),
    "by channel": Example(lambda x, t: F.relu(x + t), {"t": (WIDTH,)}),
    "power": Example(lambda x, p: F.relu(x) ** (1 + 3 * p.sigmoid()), {"p": (1, HEADS, 1, WIDTH)}, 8),  # 3,614 is e^8.2
    "unflattened": Example(
        lambda x, t: F.softplus(x * t.unflatten(-1, (HEADS, -1)).transpose(1, 2)), {"t": (1, 1, HEADS * WIDTH)}
    ),
    "directions": Example(directions, {"temperature": (HEADS, 1, 1), "offset": (WIDTH,)}),
    "two uses": Example(lambda x, t: (x * t).exp() + t.exp(), {"t": (WIDTH,)}, 16),  # x t is up to 15.6
    "outer": Example(lambda x, t: x + x.sum(-1, keepdim=True) * t, {"t": (HEADS, 1, WIDTH)}),
    "learned unit": Example(lambda x, t: x * F.normalize(t.expand_as(x), dim=-1), {"t": (WIDTH,)}),
    "rms norm": Example(lambda x, t: F.rms_norm(x, x.shape[-1:], t, 2**-20), {"t": (WIDTH,)}),
}
MAPS = {**ELEMENTWISE, **REDUCING, **LEARNED}


def gated(num, den, mass, scale, eps, gate):
    share = gate.sigmoid() / (den.abs() + eps)
    return share, num * share + scale * (1 - gate)


RULES = {
    **{name: Example(function) for name, function in NORMALIZERS.items()},
    "root": Example(lambda num, den, mass, scale, eps: ((den.square() + eps).rsqrt() * scale, num * mass)),
    "gated": Example(gated, {"gate": (HEADS, 1, 1)}),
}


def inputs(dtype=torch.float64):
    """x and the gradient of y: ordinary numbers, small and large ones, and exact zeros."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=generator) for _ in range(2))
    x[:, :, 0] *= 4
    x[:, :, 1] *= 1e-3
    x[:, :, 2, ::3] = 0
    return x.to(dtype), dy.to(dtype)


def rows(dtype=torch.float64):
    """num, den and mass; the gradients of gain and level."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.rand(BATCH, HEADS, TOKENS, 1, generator=generator) + 0.2 for _ in range(3)]
    d = [torch.randn(BATCH, HEADS, TOKENS, 1, generator=generator) for _ in range(2)]
    return [x.to(dtype) for x in numbers], [x.to(dtype) for x in d]


SCALE, EPS = 0.25, 1e-6


def traced(name, rule=False):
    """The formula of an example, the example, and the learned tensors that the function holds."""
    example = (RULES if rule else MAPS)[name]
    learned = example.tensors(learning=True)
    function = example.holding(learned)
    return trace_normalizer(function, HEADS) if rule else trace_map(function, HEADS, WIDTH), example, learned


def held(formula, rule, dtype):
    """The tensors of the formula; scale and eps of a normalizer are the first."""
    tensors = [x.detach().to(dtype) for x in formula.tensors]
    return [torch.tensor(x, dtype=dtype) for x in (SCALE, EPS)] + tensors[2:] if rule else tensors


def gradients(formula, learned, sums, tensors):
    """Of the learned tensors."""
    of_tensors = formula.tensor_gradients(tensors, sums)
    by_name = {key: of_tensors[i] for i, x in enumerate(formula.tensors) for key in learned if learned[key] is x}
    return [torch.zeros_like(learned[key]) if by_name[key] is None else by_name[key] for key in learned]


def by_torch(example, dtype, rule=False):
    """Results, gradients of x (or num and den) and of the learned tensors, by torch in a dtype."""
    tensors = {name: x.to(dtype).requires_grad_() for name, x in example.tensors().items()}
    function = example.holding(tensors)
    if rule:
        given, d = rows(dtype)
        wanted = [given[0].requires_grad_(), given[1].requires_grad_()]
        results = [x.expand(given[0].shape) for x in function(*given, SCALE, EPS)]
    else:
        x, dy = inputs(dtype)
        wanted, d = [x.requires_grad_()], [dy]
        results = [function(x)]
    chosen = [(x, dx) for x, dx in zip(results, d, strict=True) if x.requires_grad]
    sources, d = zip(*chosen, strict=True)
    grads = torch.autograd.grad(sources, [*wanted, *tensors.values()], d, allow_unused=True)
    grads = [
        torch.zeros_like(x) if dx is None else dx for x, dx in zip([*wanted, *tensors.values()], grads, strict=True)
    ]
    return [x.detach() for x in results] + grads


def assert_as_good_as_torch(actual, example, rule=False):
    """Errors are at most twice those of torch in float32, or four roundings of the largest number or its exponent."""
    exact, twin = by_torch(example, torch.float64, rule), by_torch(example, torch.float32, rule)
    for x, y, z in zip(actual, twin, exact, strict=True):
        rounding = torch.finfo(torch.float32).eps * z.abs().max().item() * example.exponent
        allowed, error = max(2 * (y - z).abs().max().item(), 4 * rounding), (x - z).abs().max().item()
        assert error <= allowed, f"{error:.1e}, allowed {allowed:.1e}"


NUMBERS = st.floats(-2, 2).map(lambda x: round(x, 2))
UNARY = {
    "x.exp()": lambda x: (x * 0.5).exp(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "elu": F.elu,
    "softplus": F.softplus,
    "square": torch.square,
    "abs": torch.abs,
    "log1p": lambda x: x.abs().log1p(),
    "sqrt": lambda x: (x.square() + 0.1).sqrt(),
    "cosine": torch.cos,
    "erf": torch.erf,
    "neg": torch.neg,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "unit": lambda x: F.normalize(x, dim=-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "largest": lambda x: x.amax(-1, keepdim=True),
    "power": lambda x: (x.abs() + 0.1) ** 1.3,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 0.5),
    "max": torch.maximum,
    "min": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "power": lambda x, y: (x.abs() + 0.1) ** y.clamp(-2, 2),
}
FORMULAS = st.recursive(
    st.one_of(st.just("x"), st.just("scalar"), st.just("channels"), NUMBERS),
    lambda part: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), part), st.tuples(st.sampled_from(sorted(BINARY)), part, part)
    ),
    max_leaves=8,
)


def written(formula, x, scalar, channels):
    """The formula's value."""
    if isinstance(formula, float):
        return torch.full_like(x, formula)
    if isinstance(formula, str):
        return {"x": x, "scalar": scalar.expand_as(x), "channels": channels.expand_as(x)}[formula]
    name, *parts = formula
    values = [written(part, x, scalar, channels) for part in parts]
    return (UNARY if len(values) == 1 else BINARY)[name](*values)


def assert_kernel_as_good_as_torch(backend, device, options, learned=(), rotary=None, key_mask=None):
    """Output and all gradients of attention: errors are at most three times those of torch.

    options: of `linear_attention`, or a function of the learned tensors that gives them.
    """
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(2, HEADS, 45, width, generator=generator) for width in (20, 20, 12)]
    grad = torch.randn(2, HEADS, 45, 12, generator=generator)

    def computed(dtype, backend):
        leaves = [x.detach().to(device, dtype).requires_grad_() for x in (*tensors, *learned)]
        chosen = options(*leaves[3:]) if callable(options) else options
        tables = None if rotary is None else type(rotary)(*(x.to(device, dtype) for x in rotary))
        mask = None if key_mask is None else key_mask.to(device)
        out = linear_attention(*leaves[:3], rotary=tables, key_mask=mask, backend=backend, **chosen)
        grads = torch.autograd.grad(out, leaves, grad.to(out), allow_unused=True)
        return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]

    exact, twin = computed(torch.float64, "torch"), computed(torch.float32, "torch")
    for ours, torchs, true in zip(computed(torch.float32, backend), twin, exact, strict=True):
        error, allowed = ((x.double() - true).norm() for x in (ours, torchs))
        assert error <= 3 * allowed + 1e-6 * true.norm() + 1e-6 * (len(learned) > 0), (error, allowed, true.norm())


def generated_options(formula):
    """Of a generated map, which holds two learned tensors."""

    def options(scalar, channels):
        return {
            "feature_map": lambda x: written(("add", "x", formula), x, scalar, channels).expand_as(x),
            "normalizer": "subtract",  # others divide by what may be zero
        }

    return options


def over_heads(scalar, channels):
    """Options with a map of keys that shares the norm of a token among its heads; it holds two learned tensors."""
    return {"feature_map": ("elu1", lambda x: F.softplus(F.normalize(x * scalar, dim=(1, 3)) * 3 + channels))}


GENERATED = [torch.full((HEADS, 1, 1), 0.7), torch.linspace(-1, 1, 20)]
WITHIN_TOKENS = {
    name: axes
    for name, axes in LINEAR_AXES.items()
    if not {*ACROSS_TOKENS} & {*([maps] if isinstance(maps := axes.get("feature_map", "elu1"), str) else maps)}
}
"""Mechanisms whose feature maps combine no tokens."""
