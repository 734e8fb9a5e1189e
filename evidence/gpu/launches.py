"""How many kernels a network launches on a GPU, and how many bytes they move, without one.

The inference of a network is traced on tensors that have no memory, and the graph of operators is cut into launches, as
eager torch starts them, and as inductor groups them:

- Matrix products, convolutions and softmax attention are launches of their own. A convolution adds its bias in one
  more, as with cuDNN, and first copies an input that is a slice of a map.
- Other operators that compute numbers one by one, or reduce rows, are a launch each in eager torch. Grouped, one that
  reads what another of the same size has written is in the same launch, unless something between the two is not; a
  launch reduces rows of one length. Constants cost nothing.
- linvit's operators are what their code launches: it runs with kernels that do nothing, and is asked for its tensors.

A launch reads each of its inputs once and writes each of its outputs once, where something outside reads it. So bytes
are a lower limit: what a kernel reads again, and tables and weights that each program reads, are left out if the cache
holds them. Inductor itself also fuses kernels that only share an input, which are separate here, and it splits long
reductions, which are one launch here; scratch memory of cuDNN and cuBLAS is not known.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import linvit
from evidence.gpu.machine_code import PROCESSORS
from linvit.kernels import depthwise_launch, launch, record, softmax_launch, support
from linvit.kernels.operator import attend, attend_packed, attend_softmax

BATCH, SIZE = 64, 224
NETWORKS = ("ravlt_tiny", "mavit_tiny", "care_s0", "deit_small_patch16_224", "convnext_tiny")
KINDS = ("linvit", "products", "convolutions", "attention", "others")
ALONE = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), "products"),
    "convolution": "convolutions",
    "softmax_attention": "attention",
}
REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "_softmax", "native_layer_norm", "linalg_vector_norm"}
JOINING = {"cat", "stack"}
MOVING = {"clone", "_to_copy", "constant_pad_nd", "copy", "native_batch_norm", "roll", "slice_scatter"}
CONSTANTS = {"arange", "linspace", "full", "zeros", "ones", "zeros_like", "ones_like", "new_full", "new_zeros", "full_like"}
CODE = {
    "attend": attend,
    "attend_packed": attend_packed,
    "attend_softmax": attend_softmax,
    "depthwise": depthwise_launch.depthwise,
}


class Launch(NamedTuple):
    """A kernel: its kind, the operators in it, and the bytes that it reads and writes."""

    kind: str
    names: tuple[str, ...]
    bytes: int


class Count(NamedTuple):
    """Kernels of a network, all and by kind, and the bytes that they move."""

    launches: int
    gigabytes: float
    kinds: dict[str, int]

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> "Count":
        kinds = Counter(each.kind for each in launches)
        return cls(len(launches), sum(each.bytes for each in launches) / 1e9, {kind: kinds[kind] for kind in KINDS})


class Name(NamedTuple):
    """A tensor in memory: one result of an operator."""

    node: Node
    result: int | str = 0


Reads = dict[Name, dict[Any, int]]
"""The bytes of each part of each tensor."""


@dataclass(eq=False)
class Step:
    """What one operator computes.

    Attributes:
        size: the numbers that it computes, or reads if it reduces them.
        rows: of a reduction, how many numbers it leaves.
        written: the tensors that it writes, with their bytes.
        fixed: what it launches, if nothing can be added to that.
    """

    name: str
    reads: Reads
    written: dict[Name, int]
    size: int = 0
    rows: int | None = None
    fixed: Sequence[Launch] | None = None


@torch.library.custom_op("evidence::softmax_attention", mutates_args=())
def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stands for torch's kernel, which cannot be chosen without a GPU."""
    return room(query, value)


def room(query: Tensor, value: Tensor) -> Tensor:
    """The output, whose heads lie inside tokens."""
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)


softmax_attention.register_fake(lambda query, key, value: room(query, value))


class OneAttention(TorchFunctionMode):
    """Softmax attention stays one operator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            assert (kwargs or {}).get("attn_mask") is None, "a bias is not counted"
            return softmax_attention(*args[:3])
        return function(*args, **(kwargs or {}))


@contextmanager
def pretended(kernels: bool) -> Iterator[None]:
    """A GPU on which linvit's kernels may be used, or not."""
    able = patch.object(support, "machine_obstacle", lambda *_, **__: None)
    many = [patch.object(module, "processors", lambda _: PROCESSORS) for module in (launch, depthwise_launch, softmax_launch)]
    with record.trusted(kernels), able, many[0], many[1], many[2]:
        yield


def traced(network: nn.Module, batch: int = BATCH, size: int = SIZE) -> GraphModule:
    """The operators of a network's inference, of images in bfloat16 with channels innermost, without mutations."""

    def without_memory(x: Tensor) -> Tensor:
        dtype = torch.bfloat16 if x.is_floating_point() else x.dtype
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda")

    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with FakeTensorMode() as fake, torch.no_grad():
        tensors = {name: without_memory(x) for name, x in (*network.named_parameters(), *network.named_buffers())}
        images = torch.empty(batch, size, size, 3, dtype=torch.bfloat16, device="cuda").permute(0, 3, 1, 2)

        def infer(tensors: dict[str, Tensor], images: Tensor) -> Any:
            return torch.func.functional_call(network, tensors, (images,))

        with OneAttention():
            graph = make_fx(infer)(tensors, images)
        # The kernels refuse transforms of torch.func, so that mutations are removed afterwards.
        graph = make_fx(torch.func.functionalize(graph))(tensors, images)
    del fake
    graph.graph.eliminate_dead_code()
    return graph


class Steps:
    """The steps of a graph, and the tensors that it returns."""

    def __init__(self, graph: GraphModule, constants: bool) -> None:
        """constants: whether what depends on no tensor is a step too."""
        self.steps: list[Step] = []
        self.constants = constants
        self.home: dict[Node, Name] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self.home[node] = Name(node)
            elif node.op == "call_function":
                self._add(node)
        self.returned = {self.home[node] for node in tree_leaves(graph.graph.output_node().args) if node in self.home}

    def _add(self, node: Node) -> None:
        source = next((each for each in node.all_input_nodes if each in self.home), None)
        if node.target is getitem:
            several = self.home[source].node is source and not is_view(source)
            self.home[node] = Name(source, node.args[1]) if several else self.home[source]
        elif is_view(node):
            if source is not None:
                self.home[node] = self.home[source]
        elif source is not None or self.constants:
            self.home[node] = Name(node)
            self._compute(node)

    def _compute(self, node: Node) -> None:
        name, results = node.target._schema.name.split("::")[1], tensors_of(node)
        reads = self._reads(node.all_input_nodes)
        written = {Name(node, number): bytes_of(x) for number, x in enumerate(results)}
        moved = total(reads) + sum(written.values())
        inputs = [each.meta["val"] for each in node.all_input_nodes]
        if name in CODE:
            self.steps.append(Step(name, reads, written, fixed=launched(name, node)))
        elif name == "convolution":
            self._convolve(node)
        elif name in ALONE:
            self.steps.append(Step(name, reads, written, fixed=[Launch(ALONE[name], (name,), moved)]))
        elif name in REDUCTIONS:
            rows = results[-1].numel() if name != "_softmax" else results[0].numel() // results[0].shape[node.args[1]]
            self.steps.append(Step(name, reads, written, max(x.numel() for x in inputs), rows))
        elif name in MOVING or name in CONSTANTS or torch.Tag.pointwise in node.target.tags:
            self.steps.append(Step(name, reads, written, results[0].numel()))
        elif written and not name.startswith(("empty", "new_empty")):
            self.steps.append(Step(name, reads, written, fixed=[Launch("others", (name,), moved)]))

    def _convolve(self, node: Node) -> None:
        """A copy of a slice of a map, the convolution, and the sum with its bias."""
        x, weight, bias, *_ = node.args
        given, reads, size = x.meta["val"], self._reads([x, weight]), bytes_of(node.meta["val"])
        parts = []
        if not (given.is_contiguous(memory_format=torch.channels_last) or given.is_contiguous()):
            parts.append(Launch("others", ("copy",), 2 * bytes_of(given)))
        parts.append(Launch("convolutions", ("convolution",), total(reads) + size))
        out, plain = Name(node), Name(node, "without bias")
        self.steps.append(Step("convolution", reads, {out if bias is None else plain: size}, fixed=parts))
        if bias is not None:
            reads = self._reads([bias]) | {plain: {None: size}}
            self.steps.append(Step("bias", reads, {out: size}, node.meta["val"].numel()))

    def _reads(self, nodes: Iterable[Node]) -> Reads:
        reads: Reads = {}
        for node in nodes:
            for x in tensors_of(node) if node in self.home else ():
                part = tuple(x.shape), x.stride(), x.storage_offset()
                reads.setdefault(self.home[node], {})[part] = bytes_of(x)
        return reads


def launches(graph: GraphModule, grouped: bool = True) -> list[Launch]:
    """The kernels of a graph: one for each operator, as in eager torch, or grouped."""
    steps = Steps(graph, constants=not grouped)
    groups = groups_of(steps.steps) if grouped else [[step] for step in steps.steps]
    readers: dict[Name, set[int]] = {}
    for number, group in enumerate(groups):
        for step in group:
            for name in step.reads:
                readers.setdefault(name, set()).add(number)
    listed: list[Launch] = []
    for number, group in enumerate(groups):
        if group[0].fixed is not None:
            listed += group[0].fixed
            continue
        written, reads = {name: size for step in group for name, size in step.written.items()}, Reads()
        for step in group:
            for name in step.reads.keys() - written.keys():
                reads[name] = reads.get(name, {}) | step.reads[name]
        kept = [size for name, size in written.items() if name in steps.returned or readers.get(name, set()) - {number}]
        listed.append(Launch("others", tuple(step.name for step in group), total(reads) + sum(kept)))
    return listed


def groups_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps that are one launch each, in an order in which they can run."""
    group_of: dict[Step, list[Step]] = {}
    writer = {name: step for step in steps for name in step.written}
    after: dict[Step, set[Step]] = {step: set() for step in steps}
    for step in steps:
        group_of[step] = [step]
        sources = {writer[name] for name in step.reads if name in writer}
        for source in sources:
            after[source].add(step)
        for source in sorted(sources, key=steps.index, reverse=True):
            ours, theirs = group_of[step], group_of[source]
            if ours is not theirs and _fit(step, source, ours, theirs) and not _around(ours, theirs, after, group_of):
                theirs += ours
                for each in ours:
                    group_of[each] = theirs
    return list({id(group): group for group in group_of.values()}.values())


def _fit(step: Step, source: Step, ours: list[Step], theirs: list[Step]) -> bool:
    """Whether both compute as many numbers, and reduce rows of one length."""
    if step.fixed is not None or source.fixed is not None:
        return False
    rows = {each.rows for each in (*ours, *theirs)} - {None}
    same = step.size == max(each.size for each in theirs) or step.size == source.rows
    joined = step.name in JOINING and source.rows is None and len(theirs) == 1
    return len(rows) <= 1 and (same or joined)


def _around(
    ours: list[Step], theirs: list[Step], after: Mapping[Step, set[Step]], group_of: Mapping[Step, list[Step]]
) -> bool:
    """Whether something else has to run between two groups."""
    ends = {*ours, *theirs}
    seen, waiting = set[Step](), [each for step in ends for each in after[step] if each not in ends]
    while waiting:
        step = waiting.pop()
        for each in (x for member in group_of.get(step, [step]) for x in after[member]):
            if each in ends:
                return True
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return False


class Notes(TorchDispatchMode):
    """Notes what torch launches for an operator beside its kernels."""

    def __init__(self, listed: list[Launch]) -> None:
        super().__init__()
        self.listed = listed

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        touched = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
        moved = sum(map(bytes_of, touched))
        if moved and not name.startswith(("empty", "new_empty")) and not has_views(function):
            self.listed.append(Launch("others", (name,), moved))
        return result


def launched(name: str, node: Node) -> list[Launch]:
    """What the code of an operator of linvit launches."""
    listed: list[Launch] = []

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        given = {id(x): x for x in tree_leaves(args) if isinstance(x, Tensor)}
        listed.append(Launch("linvit", (kernel.__name__,), sum(map(bytes_of, given.values()))))

    values = tree_map_only(Node, lambda each: each.meta["val"], list(node.args))
    values = tree_map_only(Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), values)
    with patch.object(triton.JITFunction, "run", note), Notes(listed):
        CODE[name]._init_fn(*values)  # the function itself: the operator would only tell the shapes
    return listed


def is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and has_views(node.target)


def has_views(function: Any) -> bool:
    """Whether an operator returns its input in another form."""
    returns = function._schema.returns
    return function._schema.name == "aten::_unsafe_view" or any(x.alias_info is not None for x in returns)


def tensors_of(node: Node) -> list[Tensor]:
    return [x for x in tree_leaves(node.meta["val"]) if isinstance(x, Tensor)]


def bytes_of(x: Tensor) -> int:
    """Of the numbers of a tensor, without those that are repeated."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


def total(reads: Reads) -> int:
    """Bytes of all parts, of overlapping ones not more than of the tensor."""
    return sum(min(sum(parts.values()), _whole(name, parts)) for name, parts in reads.items())


def _whole(name: Name, parts: Mapping[Any, int]) -> int:
    if isinstance(name.result, str):
        return sum(parts.values())
    value = name.node.meta["val"]
    return bytes_of(value if isinstance(value, Tensor) else value[name.result])


def counted(name: str, fused: bool, kernels: bool) -> dict[str, Count]:
    """The counts of a network, folded or not, with linvit's kernels or without: "eager" and "grouped"."""
    network = timm.create_model(name).eval().requires_grad_(False)
    with pretended(kernels):
        graph = traced(linvit.fuse(network) if fused else network)
        return {way: Count.of(launches(graph, way == "grouped")) for way in ("eager", "grouped")}


def table(names: Sequence[str]) -> str:
    """Markdown: a row for each network and way to run it."""
    heads = ("network", "folded", "kernels of linvit", "run", "launches", "GB", *KINDS)
    lines = [heads, ["---"] * 4 + ["---:"] * (len(heads) - 4)]
    for name in names:
        for fused, kernels in ((False, False), (True, False), (False, True), (True, True)):
            for way, count in counted(name, fused, kernels).items():
                texts = name, *("yes" if x else "no" for x in (fused, kernels)), way
                lines.append((*texts, str(count.launches), f"{count.gigabytes:.2f}", *map(str, count.kinds.values())))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(sys.argv[1:] or NETWORKS))
