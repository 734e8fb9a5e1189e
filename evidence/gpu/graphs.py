"""Networks as graphs of operators on a GPU, without one: tensors have shapes, strides and a device, but no memory."""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from evidence.gpu.machine_code import PROCESSORS
from linvit import kernels
from linvit.kernels import depthwise_launch, launch, product_launch, record, softmax_launch, support
from linvit.ops import backend

BATCH, SIZE = 64, 224


@library.custom_op("evidence::softmax_attention", mutates_args=())
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
def pretended(allowed: Collection[str]) -> Iterator[None]:
    """A GPU with cuDNN on which some of linvit's kernels may be used: keys of `linvit.kernels.record.CALLS`."""

    def order(x: Tensor, weight: Tensor, *_: Any) -> torch.memory_format:
        innermost = any(each.is_contiguous(memory_format=torch.channels_last) for each in (x, weight))
        return torch.channels_last if innermost else torch.contiguous_format

    with ExitStack() as stack:
        stack.enter_context(patch.object(record, "passed", lambda _, calls: calls in allowed))
        stack.enter_context(patch.object(support, "machine_obstacle", lambda *_, **__: None))
        stack.enter_context(patch.object(torch._C, "_conv_determine_backend_memory_format", order))
        for module in (launch, depthwise_launch, product_launch, softmax_launch):
            stack.enter_context(patch.object(module, "processors", lambda _: PROCESSORS))
        yield


def without_memory(x: Tensor, device: str) -> Tensor:
    """In bfloat16 if it is floating point, with the same strides."""
    dtype = torch.bfloat16 if x.is_floating_point() else x.dtype
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)


def traced(network: nn.Module, batch: int = BATCH, size: int = SIZE) -> GraphModule:
    """The operators of a network's inference, of images in bfloat16 with channels innermost, without mutations."""

    network = network.to(memory_format=torch.channels_last)
    with FakeTensorMode(), torch.no_grad():
        named = (*network.named_parameters(), *network.named_buffers())
        tensors = {name: without_memory(x, "cuda") for name, x in named}
        images = torch.empty(batch, size, size, 3, dtype=torch.bfloat16, device="cuda").permute(0, 3, 1, 2)

        def infer(tensors: dict[str, Tensor], images: Tensor) -> Any:
            return torch.func.functional_call(network, tensors, (images,))

        with OneAttention():
            graph = make_fx(infer)(tensors, images)
        # The kernels refuse transforms of torch.func, so that mutations are removed afterwards.
        graph = make_fx(torch.func.functionalize(graph))(tensors, images)
    graph.graph.eliminate_dead_code()
    return graph


def traced_step(network: nn.Module, batch: int = BATCH, size: int = SIZE) -> GraphModule:
    """The same of a step of training, up to the gradients of all parameters; on "meta", which autograd accepts."""

    network = network.train().to(memory_format=torch.channels_last)

    def step(parameters: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor) -> Any:
        logits = torch.func.functional_call(network, {**parameters, **buffers}, (images,))
        return torch.autograd.grad(logits.float().logsumexp(-1).sum(), list(parameters.values()))

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda _: False))  # knows no "meta"
        stack.enter_context(patch.object(backend, "_has_passed", lambda _, calls: record.passed(None, calls)))
        stack.enter_context(patch.object(backend, "_ready", lambda *_: kernels))
        parameters = {name: without_memory(x, "meta").requires_grad_() for name, x in network.named_parameters()}
        buffers = {name: without_memory(x, "meta") for name, x in network.named_buffers()}
        images = torch.empty(batch, size, size, 3, dtype=torch.bfloat16, device="meta").permute(0, 3, 1, 2)
        graph = make_fx(step)(parameters, buffers, images)
    graph.graph.eliminate_dead_code()
    return graph


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
