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

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import timm
import torch
import triton
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import linvit
from evidence.gpu.graphs import BATCH, SIZE, bytes_of, has_views, is_view, pretended, tensors_of, traced
from linvit.kernels import record
from linvit.kernels.depthwise_launch import depthwise, depthwise_gradients
from linvit.kernels.operator import attend, attend_backward, attend_packed, attend_softmax, attend_softmax_backward
from linvit.kernels.product_launch import surrounded
from linvit.models.by_name import is_ours

NETWORKS = ("ravlt_tiny", "mavit_tiny", "care_s0", "deit_small_patch16_224", "convnext_tiny")
WAYS: dict[str, tuple[str | None, Collection[str]]] = {
    "as it is": (None, ()),
    "folded": ("cpu", ()),
    "folded, attention": ("cpu", ("bidirectional",)),
    "as it is, all kernels": (None, tuple(record.CALLS)),
    "folded, all kernels": ("cpu", tuple(record.CALLS)),
    "folded for GPUs, all kernels": ("cuda", tuple(record.CALLS)),
}
"""The device that a network is folded for, if it is folded, and which of linvit's kernels may be used."""
PLAIN = tuple(WAYS)[:2]
KINDS = ("linvit", "products", "convolutions", "attention", "others")
ALONE = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), "products"),
    "convolution": "convolutions",
    "softmax_attention": "attention",
}
REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "_softmax", "native_layer_norm", "linalg_vector_norm"}
JOINING = {"cat", "stack"}
MOVING = {"clone", "_to_copy", "constant_pad_nd", "copy", "native_batch_norm", "roll", "slice_scatter"}
COPYING = {"clone", "copy", "copy_"}
FILLED = "full", "zeros", "ones"
CONSTANTS = {"arange", "linspace", *FILLED, *(f"{name}_like" for name in FILLED), *(f"new_{name}" for name in FILLED)}
CODE = {
    "attend": attend,
    "attend_packed": attend_packed,
    "attend_softmax": attend_softmax,
    "attend_backward": attend_backward,
    "attend_softmax_backward": attend_softmax_backward,
    "depthwise": depthwise,
    "depthwise_backward": depthwise_gradients,
    "product": surrounded,
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
        sources = [each for each in node.all_input_nodes if each in self.home]
        if node.target is getitem or is_view(node):
            if sources:
                home = self.home[sources[0]]
                is_result = node.target is getitem and home.node is sources[0] and not is_view(sources[0])
                self.home[node] = Name(home.node, cast(int, node.args[1])) if is_result else home
            return
        function = cast(torch._ops.OpOverload, node.target)
        name = function._schema.name.split("::")[1]
        constant = name in CONSTANTS or not sources
        if self.constants or not constant:
            self.home[node] = Name(node)
            if not name.startswith(("empty", "new_empty")):
                self._compute(
                    node, name, {} if constant else self._reads(sources), torch.Tag.pointwise in function.tags
                )

    def _compute(self, node: Node, name: str, reads: Reads, by_number: bool) -> None:
        results = tensors_of(node)
        written = {Name(node, number): bytes_of(x) for number, x in enumerate(results)}
        moved = total(reads) + sum(written.values())
        if name in CODE:
            self.steps.append(Step(name, reads, written, fixed=launched(name, node)))
        elif name == "convolution":
            self._convolve(node)
        elif name in ALONE:
            self.steps.append(Step(name, reads, written, fixed=[Launch(ALONE[name], (name,), moved)]))
        elif name in REDUCTIONS:
            size = max(x.numel() for each in node.all_input_nodes for x in tensors_of(each))
            rows = size // results[0].shape[cast(int, node.args[1])] if name == "_softmax" else results[-1].numel()
            self.steps.append(Step(name, reads, written, size, rows))
        elif by_number or name in MOVING or name in CONSTANTS:
            self.steps.append(Step(name, reads, written, results[0].numel()))
        else:
            self.steps.append(Step(name, reads, written, fixed=[Launch("others", (name,), moved)]))

    def _convolve(self, node: Node) -> None:
        """A copy of a slice of a map, the convolution, and the sum with its bias."""
        x, weight, bias = cast(list[Node], node.args[:3])
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
                place = tuple(x.shape), x.stride(), x.storage_offset()
                reads.setdefault(self.home[node], {})[place] = bytes_of(x)
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
        super().__init__()  # type: ignore[no-untyped-call]
        self.listed = listed

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        touched = [x for x in tree_leaves((() if name in CONSTANTS else args, result)) if isinstance(x, Tensor)]
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
    values = tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), values
    )
    with patch.object(triton.JITFunction, "run", note), Notes(listed):
        CODE[name]._init_fn(*values)  # the function itself: the operator would only tell the shapes
    return listed


def total(reads: Reads) -> int:
    """Bytes of all parts, of overlapping ones not more than of the tensor."""
    return sum(min(sum(parts.values()), _whole(name, parts)) for name, parts in reads.items())


def _whole(name: Name, parts: Mapping[Any, int]) -> int:
    if isinstance(name.result, str):
        return sum(parts.values())
    value = name.node.meta["val"]
    return bytes_of(value if isinstance(value, Tensor) else value[name.result])


def copies(graph: GraphModule) -> list[Launch]:
    """What only moves numbers to other places."""
    return [each for each in launches(graph, grouped=False) if each.names[0] in COPYING]


def counted(name: str, way: str, batch: int = BATCH, size: int = SIZE) -> tuple[Count, Count]:
    """The counts of a network run in a way of WAYS, by eager torch and grouped."""
    device, kernels = WAYS[way]
    network = timm.create_model(name).eval().requires_grad_(False)
    with pretended(kernels):
        graph = traced(network if device is None else linvit.fuse(network, for_device=device), batch, size)
        eager, grouped = (Count.of(launches(graph, grouped)) for grouped in (False, True))
    return eager, grouped


def table(names: Sequence[str]) -> str:
    """Markdown: a row for each network and way to run it."""
    heads = "network", "run", "eager: launches", "GB", "grouped: launches", "GB", *KINDS
    lines: list[Sequence[str]] = [heads, ("---", "---", *["---:"] * (len(heads) - 2))]
    for name in names:
        for way in WAYS if is_ours(name) else PLAIN:
            eager, grouped = counted(name, way)
            cells = [x for count in (eager, grouped) for x in (str(count.launches), f"{count.gigabytes:.2f}")]
            lines.append((f"`{name}`", way, *cells, *map(str, grouped.kinds.values())))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(sys.argv[1:] or NETWORKS))
