"""Opens a .pt2 file without torch.export.load, which unpickles, imports and evaluates parts of the file.

The graph is JSON and the weights are bytes. No part of the file becomes code: every step is an operator in OPERATORS.
"""

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from linvit.deploy.facts import FactsError
from linvit.errors import refuse

SIZES = "add sub mul floordiv truediv mod neg getitem eq ne lt le gt ge"
ATEN = """
abs acos addcmul addcmul_ addmm add.Scalar add.Tensor add_.Scalar add_.Tensor asin atan atan2 bitwise_and.Tensor
bitwise_not bitwise_or.Tensor bmm ceil clamp clamp.Tensor clamp_ clamp_min clamp_max cos cumsum div.Scalar div.Tensor
div.Tensor_mode div_.Tensor eq.Scalar eq.Tensor erf exp expm1 exp_ floor floor_divide fmod.Scalar ge.Scalar ge.Tensor
gt.Scalar gt.Tensor isfinite isinf isnan le.Scalar le.Tensor log log1p log2 logical_and logical_not logical_or
lt.Scalar lt.Tensor masked_fill.Scalar masked_fill_.Scalar matmul maximum minimum mm mul.Scalar mul.Tensor mul_.Scalar
mul_.Tensor ne.Scalar ne.Tensor neg pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal remainder.Scalar round
rsqrt rsub.Scalar sign sin sqrt square sub.Scalar sub.Tensor sub_.Tensor where.ScalarOther where.ScalarSelf where.self
__and__.Tensor __or__.Tensor
all any any.dim amax amin argmax argmin linalg_vector_norm logsumexp max max.dim mean mean.dim min min.dim
norm.ScalarOpt_dim prod.dim_int sort std.correction sum sum.dim_IntList topk var.correction var_mean.correction
alias cat chunk clone constant_pad_nd contiguous copy_ detach detach_ diagonal einsum embedding expand expand_as
flatten.using_ints flip gather index.Tensor index_select lift_fresh_copy mT matrix_H meshgrid meshgrid.indexing
movedim.int movedim.intlist narrow numpy_T pad permute pixel_shuffle pixel_unshuffle repeat repeat_interleave.self_int
reshape reshape_as roll scatter.src scatter.value select.int slice.Tensor split.Tensor split_with_sizes squeeze
squeeze.dim squeeze.dims stack transpose.int tril triu unbind.int unflatten.int unfold unsqueeze view view_as
arange arange.start arange.start_step eye full full_like linspace new_full new_ones new_zeros ones ones_like
scalar_tensor sym_size.int to.device to.dtype to.dtype_layout to.other promote_types type_as zeros zeros_like
_assert_tensor_metadata _to_copy
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d avg_pool1d avg_pool2d batch_norm celu conv1d conv2d
conv2d.padding conv_transpose2d.input cosine_similarity dropout dropout_ elu elu_ feature_dropout gelu glu group_norm
hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ im2col instance_norm layer_norm leaky_relu
leaky_relu_ linear log_softmax.int max_pool2d mish native_layer_norm prelu relu relu6 relu_ rms_norm
scaled_dot_product_attention selu sigmoid sigmoid_ silu silu_ softmax.int softplus tanh tanh_ upsample_bicubic2d.vec
upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest2d.vec _native_batch_norm_legit_no_training
_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec
"""
"""The operators that exported networks use, and similar ones. None reads or writes files or starts a program."""

OPERATORS = {f"torch.ops.aten.{name}" + ".default" * ("." not in name) for name in ATEN.split()}
OPERATORS |= {f"_operator.{name}" for name in SIZES.split()} | {f"math.{name}" for name in ("ceil", "floor", "trunc")}
OPERATORS |= {f"torch.sym_{name}" for name in ("float", "max", "min", "not")}

# Numbers that torch writes for dtypes and for an argument with a name.
DTYPES = dict(enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16), 1))
DTYPES |= {7: torch.float32, 8: torch.float64, 12: torch.bool, 13: torch.bfloat16}
KEYWORD = 2


class Program:
    """The program of a .pt2 file: a function from the inputs of its network to its outputs.

    Args:
        graph: `graph_module` of the file.
        weights: parameters, buffers and constants by name.
    """

    def __init__(self, graph: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self._values: list[Any] = []  # weights and constants; None in the places of inputs and results
        self._places: dict[str, int] = {}  # by name
        self._inputs: list[int] = []
        for spec in graph["signature"]["input_specs"]:
            kind, content = _only(spec)
            if kind == "user_input":
                self._inputs.append(self._result(content["arg"]))
            else:
                self._places[content["arg"]["name"]] = self._constant(weights[content[f"{kind}_name"]])
        steps = [self._step(node) for node in graph["graph"]["nodes"]]
        self._outputs = [self._argument(spec["user_output"]["arg"]) for spec in graph["signature"]["output_specs"]]
        last = {place: number for number, step in enumerate(steps) for place in tree_leaves(step[1:4])}  # last use
        ends: list[list[int]] = [[] for _ in steps]
        for place in last.keys() - set(self._outputs):
            ends[last[place]].append(place)
        self._steps = [(*step, end) for step, end in zip(steps, ends, strict=True)]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = self._values.copy()
        for place, value in zip(self._inputs, inputs, strict=True):
            values[place] = value
        for function, arguments, keywords, results, several, end in self._steps:
            answer = function(*_taken(arguments, values), **{name: _taken(x, values) for name, x in keywords.items()})
            answers = answer if several else (answer,)
            for place, value in zip(results, answers, strict=False):  # an assertion has no result
                values[place] = value
            for place in end:
                values[place] = None
        return tuple(values[place] for place in self._outputs)

    def _step(self, node: Mapping[str, Any]) -> tuple[Any, ...]:
        """An operator, the places of arguments, of those with names, and of results; whether it returns several."""
        target = node["target"]
        if target not in OPERATORS:
            raise ValueError(f"it contains {target[:80]!r}, which linvit does not write")
        module, _, name = target.partition(".")
        function = attrgetter(name)({"torch": torch, "math": math, "_operator": operator}[module])
        arguments, keywords = [], {}
        for entry in node["inputs"]:
            place = self._argument(entry["arg"])
            if entry["kind"] == KEYWORD:
                keywords[entry["name"]] = place
            else:
                arguments.append(place)
        outputs = node["outputs"]
        several = len(outputs) > 1 or "as_tensors" in (*outputs, {})[0]
        if len(outputs) == 1 and several:
            outputs = [{"as_tensor": result} for result in outputs[0]["as_tensors"]]
        return function, arguments, keywords, [self._result(output) for output in outputs], several

    def _constant(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _result(self, argument: Mapping[str, Any]) -> int:
        _, content = _only(argument)
        place = self._constant(None)
        if isinstance(content, dict):
            self._places[content.get("name") or content["as_name"]] = place
        return place

    def _argument(self, argument: Mapping[str, Any]) -> Any:
        """The place of an argument, or a list of places."""
        kind, content = _only(argument)
        if isinstance(content, list):
            single = kind.removesuffix("s")
            return [self._argument(x if isinstance(x, dict) and "name" not in x else {single: x}) for x in content]
        if kind == "as_tensor":
            return self._places[content["name"]]
        if kind == "as_name":
            return self._places[content]
        if isinstance(content, dict) and kind != "as_device":  # a size, or what may be missing
            return self._argument(content)
        return self._constant(CONSTANTS[kind](content))


CONSTANTS: Mapping[str, Callable[[Any], Any]] = {
    "as_none": lambda content: None,
    "as_int": int,
    "as_float": float,
    "as_bool": bool,
    "as_string": str,
    "as_scalar_type": DTYPES.__getitem__,
    "as_memory_format": {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}.__getitem__,
    "as_layout": {7: torch.strided}.__getitem__,
    "as_device": lambda content: {"cpu": torch.device("cpu")}[content["type"]],
}
"""Constants of a graph, by their kind."""


def read(path: Path) -> tuple[str | None, Program]:
    """The facts in a .pt2 file, as text, and its program."""
    with ZipFile(path) as archive:
        entries = archive.infolist()
        refuse(
            any(entry.compress_type != ZIP_STORED for entry in entries)
            and "its entries are compressed, but linvit writes them uncompressed",
            sum(entry.file_size for entry in entries) > path.stat().st_size and "its entries are larger than the file",
        )
        names = {entry.filename.partition("/")[2]: entry.filename for entry in entries}
        if any(name.startswith("data/aotinductor/") for name in names):
            raise FactsError(
                f"{path} contains machine code, which linvit never runs: if you trust it, load it with"
                " torch._inductor.aoti_load_package."
            )
        stored: dict[str, Tensor] = {}
        weights = {}
        for group in ("weights", "constants"):
            config = json.loads(archive.read(names[f"data/{group}/model_{group}_config.json"]))["config"]
            for name, about in config.items():
                file = f"data/{group}/{about['path_name']}"
                if file not in stored:
                    stored[file] = torch.frombuffer(bytearray(archive.read(names[file])), dtype=torch.uint8)
                meta = about["tensor_meta"]
                size, stride = ([entry["as_int"] for entry in meta[field]] for field in ("sizes", "strides"))
                flat = stored[file].view(DTYPES[meta["dtype"]])
                weights[name] = flat.as_strided(size, stride, meta["storage_offset"]["as_int"])
        graph = json.loads(archive.read(names["models/model.json"]))["graph_module"]
        text = archive.read(names["extra/linvit"]).decode() if "extra/linvit" in names else None
    return text, Program(graph, weights)


def _only(union: Mapping[str, Any]) -> tuple[str, Any]:
    ((kind, content),) = union.items()
    return kind, content


def _taken(places: Any, values: Sequence[Any]) -> Any:
    return values[places] if isinstance(places, int) else [_taken(place, values) for place in places]
