"""Every kernel is compiled to machine code, which needs no GPU: Triton brings the compiler and the assembler."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from formula_examples import HEADS, MAPS, WIDTH
from tiers import quick

from linvit.bench import product
from linvit.bench.depthwise import WORKS, operands
from linvit.bench.product import LAYERS
from linvit.formulas.trace import trace_map
from linvit.kernels.support import DTYPES, PADDED, SHARED, padded

triton = pytest.importorskip("triton", reason="Triton is not installed")

from evidence.gpu.machine_code import codes, compiling, depthwise_codes, product_codes  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process"),
    pytest.mark.skipif(find_spec("triton.backends.nvidia") is None, reason="this Triton has no compiler for CUDA"),
]
BLACKWELL, HOPPER, AMPERE, GEFORCE, TURING = 120, 90, 80, 86, 75
BIDIRECTIONAL = {"query_mean", "summarize", "merge", "read", "read_backward", "summarize_backward"}
CAUSAL = {"chunked", "chunked_query_backward", "chunked_key_backward"}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The kernels that launches compile, none of which runs, and the bytes of shared memory that they need."""
    names = {}
    run = triton.JITFunction.run

    def note(kernel, *args, **options):
        binary = run(kernel, *args, **options)
        assert binary.asm["cubin"]
        names[kernel.__name__] = max(names.get(kernel.__name__, 0), binary.metadata.shared)
        return binary

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.JITFunction, "run", note)
    return names


def compile_all(
    capability,
    dtype,
    width,
    value_width,
    rotated=True,
    masked=False,
    packed=False,
    causal=False,
    tokens=640,
    backward=True,
    presets=((True, "divide"), (False, "magnitude")),
    example="elu1",
    heads=8,
):
    from linvit.kernels import causal_launch, launch
    from linvit.kernels.device_code import name_of

    query, key = (torch.empty(1, tokens, heads, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    value = torch.empty(1, tokens, heads, value_width, dtype=dtype).transpose(1, 2)
    rotary = (torch.empty(tokens, width // 2),) * 2 if rotated else (None, None)
    visible = torch.ones(1, 1, tokens, dtype=torch.bool).expand(1, heads, tokens) if masked else None
    cu_seqlens = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32) if packed else None
    formula = trace_map(MAPS[example].holding(MAPS[example].tensors(True)), HEADS, WIDTH)
    rows = formula.parameter_rows(HEADS, WIDTH, padded(WIDTH), 0)
    inputs = launch.Inputs(query, key, value, rotary, visible, None, cu_seqlens, (rows, rows, None))
    with compiling(capability):
        for query_mean, normalizer in presets:
            name = name_of(formula)
            options = launch.Options(name, name, query_mean and not causal, normalizer, 1e-6)
            if causal:
                for block in (1,) if packed else (1, 16, 100):
                    out, states = causal_launch.causal_forward(inputs, options, block)
                    causal_launch.causal_backward(torch.empty_like(out), inputs, states, options, block, inputs[:3])
                continue
            out, states, sums = launch.forward(inputs, options)
            if backward:
                launch.backward(torch.empty_like(out), inputs, states, sums, options, inputs[:3])


def test_forward_in_bfloat16_at_width_64(compiled):
    compile_all(HOPPER, torch.bfloat16, 64, 64, backward=False, presets=((True, "divide"),))
    assert set(compiled) == {"pack_table", "query_mean", "summarize", "merge", "read"}


@pytest.mark.parametrize("example", quick(["by channel", "directions", "outer", "softmax", "expm1"], ["by channel"]))
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_functions_of_a_user(compiled, example, causal):
    presets = ((False, "magnitude"),)
    compile_all(
        HOPPER,
        torch.bfloat16,
        WIDTH,
        32,
        rotated=False,
        causal=causal,
        tokens=70,
        presets=presets,
        example=example,
        heads=HEADS,
    )
    assert set(compiled) >= (CAUSAL if causal else {"read_backward", "summarize_backward"})


BUDGETS = yaml.safe_load(Path(__file__).with_name("budgets.yaml").read_text())


@pytest.mark.parametrize(
    ("capability", "backward"),
    [(HOPPER, False), *(pytest.param(card, True, marks=pytest.mark.slow) for card in (HOPPER, AMPERE, TURING))],
)
def test_instructions_are_within_their_budget(capability, backward):
    """Those of the main loop, its barriers, and spilled registers."""
    by_capability = BUDGETS.get(".".join(triton.__version__.split(".")[:2]))
    if by_capability is None:
        pytest.skip(f"budgets.yaml has no budgets for Triton {triton.__version__}")
    budgets = by_capability[str(capability / 10)]
    found = codes(capability, backward=backward) | depthwise_codes(capability, backward)
    if capability == HOPPER:
        found |= product_codes(HOPPER)
    assert set(found) == {name for name in budgets if backward or not ("backward" in name or "local groups" in name)}
    for name, code in found.items():
        most = budgets[name]
        assert code.spilled <= most["spilled"], (name, code)
        assert code.barriers <= most["barriers"], (name, code)
        assert code.instructions <= most["instructions"], (name, code)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16, "width": 64, "value_width": 64, "masked": True},
        {"dtype": torch.bfloat16, "width": 16, "value_width": 48, "packed": True},
        {"dtype": torch.float16, "width": 128, "value_width": 128, "masked": True, "packed": True},
        {"dtype": torch.float16, "width": 64, "value_width": 64},
        {"dtype": torch.float32, "width": 17, "value_width": 17, "rotated": False},
        {"dtype": torch.float32, "width": 128, "value_width": 128},
        {"dtype": torch.bfloat16, "width": 32, "value_width": 32, "tokens": 1},
    ],
    ids=["masked", "packed", "float16", "narrow float16", "odd", "float32", "one token"],
)
def test_everything(compiled, capability, options, causal):
    compile_all(capability, causal=causal, **options)
    packing = {"pack_table"} if options["dtype"] == torch.bfloat16 else set()
    if causal:
        assert set(compiled) >= CAUSAL
    elif options.get("tokens") == 1:
        assert set(compiled) == {"attend_head", "read_backward", "summarize_backward"} | packing
    else:
        assert set(compiled) == BIDIRECTIONAL | packing


@pytest.mark.slow
@pytest.mark.parametrize("capability", [HOPPER, AMPERE, TURING])
@pytest.mark.parametrize("name", WORKS)
def test_depthwise_convolutions(compiled, capability, name):
    from linvit.kernels import depthwise_launch

    dtype = torch.float16 if capability == TURING else torch.float32
    x, y, gate, weights, biases, grad = operands(WORKS[name], (2, 24, 14, 9), "meta").to(dtype)
    groups, options = [len(group) for group in WORKS[name].kernels], WORKS[name][2:]
    with compiling(capability):
        around = depthwise_launch.Around(y, gate, *options)
        depthwise_launch.depthwise_forward(x, weights, biases, groups, around)
        depthwise_launch.all_gradients(grad, x, weights, biases, y, gate, groups, *options, True, True)
    assert set(compiled) == {"depthwise_rows", "depthwise_taps"}
    assert max(compiled.values()) <= min(min(row) for row in SHARED["depthwise"].values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [HOPPER, AMPERE, GEFORCE])
@pytest.mark.parametrize("name", LAYERS)
def test_products_take_no_more_than_the_table_says(compiled, capability, name):
    from linvit.kernels import product_launch

    for layer in (LAYERS[name], LAYERS[name]._replace(out=512, residual=(), scaled=False, added=False)):
        given = product.cast_to(torch.bfloat16, product.operands(layer, (64, 14, 14), "meta"))
        with compiling(capability):
            product_launch.product_forward(**given)
    assert set(compiled) == {"product_tile"}
    assert compiled["product_tile"] <= min(SHARED["product"][torch.bfloat16])


def compile_one_stage(compiled, monkeypatch, capability, dtype, width, **options):
    """Compiles with one tile on the way, and compares the shared memory with the table."""
    from linvit.kernels import launch

    def one_stage(settings):
        return {width: setting._replace(stages=1) for width, setting in settings.items()}

    for name in ("SETTINGS", "TF32_SETTINGS"):
        tables = {kernel: one_stage(settings) for kernel, settings in getattr(launch, name).items()}
        monkeypatch.setattr(launch, name, tables)
    for name in ("FLOAT32", "CHUNKS", "WIDE_CHUNKS"):
        monkeypatch.setattr(launch, name, one_stage(getattr(launch, name)))
    compile_all(capability, dtype, width, width, **options)
    rows = SHARED["causal" if options.get("causal") else "bidirectional"]
    row = rows[torch.float32 if capability < AMPERE else dtype]
    assert max(compiled.values()) <= row[PADDED.index(width)], compiled


@pytest.mark.slow
def test_one_stage_for_a_card_without_tensor_cores(compiled, monkeypatch):
    compile_one_stage(compiled, monkeypatch, TURING, torch.float32, 16, backward=False)
    assert set(compiled) == {"query_mean", "summarize", "merge", "read"}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("capability", "dtype", "width"),
    [(TURING, dtype, width) for dtype in (torch.float32, torch.float16) for width in (16, 32, 64)]
    + [(GEFORCE, dtype, width) for dtype in DTYPES for width in (64, 128)]
    + [(card, torch.bfloat16, width) for card in (HOPPER, BLACKWELL) for width in PADDED],
)
def test_one_stage_takes_no_more_than_the_table_says(compiled, monkeypatch, capability, dtype, width, causal):
    compile_one_stage(compiled, monkeypatch, capability, dtype, width, causal=causal, masked=True)
    assert set(compiled) >= (CAUSAL if causal else BIDIRECTIONAL)


@pytest.mark.slow
@pytest.mark.parametrize("ample", [False, True])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE, GEFORCE])
@pytest.mark.parametrize("width", PADDED)
def test_softmax_takes_no_more_than_the_table_says(compiled, monkeypatch, capability, width, ample):
    from linvit.kernels import launch, softmax_launch

    monkeypatch.setattr(softmax_launch, "_has_ample_memory", lambda device: ample)
    for tokens in (49, 100, 256):
        query, key, value = (torch.empty(1, tokens, 8, width, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
        tables = torch.empty(tokens, width // 2), torch.empty(tokens, width // 2)
        visible = torch.ones(1, 1, tokens, dtype=torch.bool).expand(1, 8, tokens)
        inputs = launch.Inputs(query, key, value, tables, visible, None, None)
        with compiling(capability):
            out, masses = softmax_launch.softmax_forward(inputs, True)
            softmax_launch.softmax_backward(torch.empty_like(out), inputs, out, masses)
    of_table = SHARED["softmax"][torch.bfloat16][PADDED.index(width)]
    assert compiled["softmax_head"] <= of_table
    assert compiled["softmax_head_backward"] <= (max(of_table, softmax_launch.AMPLE) if ample else of_table)
