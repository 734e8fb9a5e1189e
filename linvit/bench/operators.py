"""`linvit bench op`: our operator against softmax attention and against the released order of operations."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linvit.bench.clock import Call, TensorsCall
from linvit.bench.exactness import TOLERANCES, WrongResultError
from linvit.bench.machine import peak
from linvit.bench.options import OperatorOptions
from linvit.bench.reference import REFERENCES, Tables, wide_tables
from linvit.bench.rows import Progress, Report, Row, Trial, crossover, curves, growth, measure_groups
from linvit.files import explained
from linvit.formulas.feature_map import FEATURE_MAPS
from linvit.layers.mechanisms import LINEAR_AXES
from linvit.layers.token_attention import GatedAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.ops import initial_mixing, linear_attention, rotary_2d
from linvit.ranges import check_names

SOFTMAX = "softmax"
FLASH = "flash_bla"
VARIANTS = ("plain", "compiled", "cpp", "triton", "reference", "sdpa", FLASH)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = ("heads", "tokens", "map", "own")
OWN_LAYOUT = {"reference": "map", "sdpa": "heads"}  # the released networks' and softmax's best; ours get tokens
BLOCKS = (4, 4)  # of MHLA, as in its DeiTs
FITTED_FROM = 784  # fewer tokens cost more in calls than in arithmetic


@dataclass(frozen=True)
class Case:
    """One call: operator, variant, dtype and shape; `layout` is how (batch, heads, tokens, width) lies in memory.

    heads: heads outermost; tokens: (batch, tokens, heads, width), as after a linear layer; map: (batch, heads,
    width, tokens), as after a convolution; own: for each variant the layout that its network provides.
    """

    operator: str
    variant: str
    dtype: str
    tokens: int
    batch: int = 1
    heads: int = 4
    width: int = 64
    backward: bool = False
    layout: str = "heads"
    device: str = "cpu"
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.operator} {self.variant} {self.dtype} at {self.tokens} tokens"

    @property
    def rotated(self) -> bool:
        """Whether there is a rotation, as in RAVLT and MAViT; CARE and the others have none."""
        return TOKEN_LAYERS[self.operator] is GatedAttention and self.width % 4 == 0


def check_options(options: OperatorOptions) -> None:
    """Raises ValueError for names that do not exist."""
    check_names("operator", options.operators, LINEAR_AXES)
    check_names("variant", options.variants, VARIANTS)
    check_names("dtype", options.dtypes, DTYPES)
    check_names("layout", [options.layout], LAYOUTS)


def grid(tokens: int) -> tuple[int, int]:
    """The (height, width) nearest to a square with this many tokens."""
    height = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
    return height, tokens // height


def operands(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """Query, key and value from the seed, and the gradient of the output if one is asked for."""
    generator = torch.Generator(case.device).manual_seed(case.seed)
    shape = (case.batch, case.heads, case.tokens, case.width)

    def random() -> Tensor:
        x = torch.randn(shape, generator=generator, device=case.device).to(DTYPES[case.dtype])
        layout = OWN_LAYOUT.get(case.variant, "tokens") if case.layout == "own" else case.layout
        if layout == "heads":
            return x
        order = (0, 2, 1, 3) if layout == "tokens" else (0, 1, 3, 2)
        return x.permute(order).contiguous().permute(order)

    return [random() for _ in range(3)], random() if case.backward else None


def build_call(case: Case) -> TensorsCall:
    """A function without arguments that returns (output,), with backward also the gradients of query, key and value."""
    return _call(_function(case, DTYPES[case.dtype]), *operands(case))


def _call(function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor | None) -> TensorsCall:
    if gradient is None:
        return lambda: (function(*inputs),)
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward_and_backward() -> tuple[Tensor, ...]:
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, gradient)

    return forward_and_backward


def _function(case: Case, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The variant as a function of query, key and value of this dtype."""
    if case.variant == "sdpa":
        return scaled_dot_product_attention
    rotary = None
    if case.rotated:
        rotary = rotary_2d(grid(case.tokens), case.width, dtype=dtype, device=torch.device(case.device))
    if case.variant == "reference":
        if case.operator not in REFERENCES:
            raise ValueError("its released order is not implemented")
        tables = None if rotary is None else Tables(*(table.to(dtype) for table in wide_tables(rotary)))
        return partial(REFERENCES[case.operator], tables=tables)
    if case.variant == FLASH:
        return _flash_bla(case.operator)
    backend = case.variant if case.variant in ("cpp", "triton") else "torch"
    axes = dict(LINEAR_AXES[case.operator])
    if case.operator == "mhla":
        mixing = initial_mixing(BLOCKS, device=torch.device(case.device)).to(torch.promote_types(dtype, torch.float32))
        axes |= {"mixing": mixing, "blocks": BLOCKS, "grid": grid(case.tokens)}
    function = partial(linear_attention, rotary=rotary, backend=backend, **axes)
    if backend != "torch":
        shape = (1, 1, case.tokens, case.width)
        function(*(torch.zeros(shape, device=case.device, dtype=dtype) for _ in range(3)))
    return torch.compile(function, dynamic=False) if case.variant == "compiled" else function


def _flash_bla(operator: str) -> Callable[..., Tensor]:
    """The kernels of flash-bidirectional-linear-attention, which take queries and keys after κ."""
    if operator != "linear":
        raise ValueError(f"flash_bla has no {operator}")
    with explained("flash_bla is not installed", ImportError):
        from flash_bla.ops.linear_attn.fused import linear_attention as flash
    kappa = FEATURE_MAPS["elu1"]
    return lambda query, key, value: flash(kappa(query), kappa(key), value)


def exact(case: Case) -> tuple[Tensor, ...]:
    """The same in float64 on the same (rounded) inputs, in the released order if we have it.

    One image at a time: the scores of softmax attention in float64 would not fit the memory of a GPU otherwise.
    """
    inputs, gradient = operands(case)
    if case.variant != "sdpa":
        case = replace(case, variant="reference" if case.operator in REFERENCES else "plain")
    function = _function(case, torch.float64)

    def of_image(index: int) -> Sequence[Tensor]:
        wide = [x[index : index + 1].double() for x in inputs]
        return _call(function, wide, None if gradient is None else gradient[index : index + 1].double())()

    images = [of_image(index) for index in range(case.batch)]
    return tuple(torch.cat(results) for results in zip(*images, strict=True))


def measure(options: OperatorOptions, report: Report, progress: Progress) -> None:
    """Checks, then times every variant at every number of tokens, into report; raises as `measure_groups`."""
    groups = ((f"{tokens} tokens", trials(options, tokens)) for tokens in options.tokens)
    with torch.inference_mode(not options.backward):
        try:
            measure_groups(groups, options, report, progress)
        finally:
            report.findings.update(findings(report.rows))


def trials(options: OperatorOptions, tokens: int) -> Iterator[Trial]:
    """All calls at one number of tokens; softmax attention appears once per dtype."""
    named = [(name, variant) for name in options.operators for variant in options.variants if variant != "sdpa"]
    if "sdpa" in options.variants:
        named.append((SOFTMAX, "sdpa"))
    work = "forward_backward" if options.backward else "forward"
    shape = ("batch", "heads", "width", "backward", "layout", "device", "seed")
    for dtype, (name, variant) in itertools.product(dict.fromkeys(options.dtypes), named):
        case = Case(name, variant, dtype, tokens, **{each: getattr(options, each) for each in shape})
        row = Row(name, variant, dtype, options.batch, options.threads, work, tokens=tokens)
        if variant == "sdpa" and tokens > options.sdpa_tokens:
            row.skipped = f"softmax attention is asked for up to {options.sdpa_tokens} tokens"
        yield Trial(
            row,
            case.name,
            make=partial(build_call, case),
            expected=partial(exact, case),
            tolerance=TOLERANCES[DTYPES[dtype]],
            excused=(ValueError, WrongResultError) if variant == FLASH else (ValueError,),
            peak=partial(peak, _call_alone, case, options.device, options.threads),
            base=replace(case, variant="plain", dtype="float32").name,
            rivals={
                "reference": replace(case, variant="reference").name,
                "sdpa": replace(case, operator=SOFTMAX, variant="sdpa").name,
            },
        )


def _call_alone(case: Case) -> Call:
    with torch.inference_mode(not case.backward):
        call = build_call(case)
    return call if case.backward else torch.inference_mode()(call)


def findings(measured: Sequence[Row]) -> dict[str, dict[str, float]]:
    """growth: the exponent of tokens, from FITTED_FROM on; crossover: tokens from which on sdpa is slower."""
    lines = curves(measured)
    softmax = {name.removeprefix(f"{SOFTMAX} sdpa "): line for name, line in lines.items() if line[0].variant == "sdpa"}
    meets = {}
    for name, line in lines.items():
        rival = softmax.get(name.removeprefix(f"{line[0].name} {line[0].variant} "))
        if rival and rival is not line and (extent := crossover(line, rival)) is not None:
            meets[name] = extent
    return {"growth": growth(measured, FITTED_FROM), "crossover": meets}
