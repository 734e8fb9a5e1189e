"""One image over several processes: every process has some of its rows, and all get the same logits."""

import copy
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from timm.layers import DropPath
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.functional import pad

from linvit.arguments import kind
from linvit.errors import refuse
from linvit.models.backbone import Backbone
from linvit.models.sequence import Decoder
from linvit.ops.state import accumulator_dtype
from linvit.parallel.exchange import Exchange
from linvit.parallel.layers import ALTERNATIVES, AVERAGES, check_layers, pooling, share_layers


def rows_of(height: int, processes: int, stride: int = 32) -> list[slice]:
    """The rows of each process: about equally many multiples of the stride, in order; the last has the rest too.

    height: of the image in pixels, or the number of tokens. stride: product of all strides of the network.
    Raises ValueError if there are more processes than multiples.
    """
    units = height // stride
    if units < processes:
        raise ValueError(
            f"`height` is {height}, which has {units} times the {stride} rows that a process needs at least, but the"
            f" number of processes is {processes}: take fewer processes or a larger input"
        )
    ends = [units * rank // processes * stride for rank in range(processes)] + [height]
    return [slice(*pair) for pair in pairwise(ends)]


class Sharded(nn.Module):
    """A network whose processes have each some of the rows, or tokens, of every input; made by `shard`.

    Attributes:
        network: a copy of the network with the same parameters and buffers.
        stride: see `rows_of`.
        exchange: counts the bytes sent, see Exchange.
    """

    def __init__(self, network: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        kept = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        self.network = copy.deepcopy(network, kept)
        self.training = network.training
        self.exchange = exchange
        if isinstance(self.network, VisionTransformer | SwinTransformer):
            self.network.patch_embed.strict_img_size = False  # the size of the whole images is checked instead
        device = next(network.parameters()).device
        self.layout = share_layers(self.network, exchange, int(getattr(network, "num_prefix_tokens", 0)), device)
        self.stride = self.layout.stride
        self._logits = next(logits for family, logits in LOGITS.items() if isinstance(network, family))

    def every_rows(self, height: int) -> list[slice]:
        """The rows of each process.

        Raises ValueError if there are too few for each process, or for the halo of a layer.
        """
        every = rows_of(height, self.exchange.number, self.stride)
        thinnest = min(rows.stop - rows.start for rows in every)
        for name, stride, needed in self.layout.halos:
            if self.exchange.number > 1 and thinnest // stride < needed:
                raise ValueError(
                    f"`height` is {height}, which gives {self.exchange.number} processes {thinnest} rows or more, but"
                    f" the layer {name} needs {needed * stride} of its neighbours': take fewer processes or a larger"
                    " input"
                )
        return every

    def rows(self, height: int) -> slice:
        """The rows of this process; raises as `every_rows`."""
        return self.every_rows(height)[self.exchange.rank]

    def forward(self, x: Tensor, height: int | None = None) -> Tensor:
        """Images (batch, channels, height, width) or tokens (batch, tokens) to the output of the network for them.

        All processes get the same output. With data-parallel training (DistributedDataParallel) over all processes, the
        gradients are those of a single process.

        Args:
            x: the whole input, the same in all processes; with `height`, only the rows `rows(height)` of the images.
            height: of the whole images.

        Raises:
            ValueError: for an input that cannot be divided, in training for random numbers that differ between the
                processes and for dropout of single tokens; before anything is sent, in all processes.
            ConnectionError: if another process ended.
        """
        dim = -1 if isinstance(self.network, Decoder) else -2
        whole = x.shape[dim] if height is None else height
        every = self.every_rows(whole)
        rows = every[self.exchange.rank]
        _check_whole(self.network, x, whole)
        if height is None:
            x = x[..., rows] if dim == -1 else x[..., rows, :]
        if x.shape[dim] != rows.stop - rows.start:
            raise ValueError(
                f"`x` has {x.shape[dim]} rows, expected {rows.stop - rows.start}: pass `rows({whole})` of the images"
            )
        if self.training:
            self._check_random(x.device)
        self.layout.set_place(rows.start)
        return self._logits(self.network, x, every, self.exchange)

    def _check_random(self, device: torch.device) -> None:
        """Stochastic depth and the classifier's dropout decide about whole images: alike in all processes."""
        random = False
        for name, module in self.network.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0 and "head" not in name:
                raise ValueError(
                    f"the layer {name} drops single values, which no other process knows: set its rate to 0, or use"
                    " stochastic depth"
                )
            random |= isinstance(module, nn.Dropout) and module.p > 0
            random |= isinstance(module, DropPath) and bool(module.drop_prob)
        if not random or self.exchange.number == 1:
            return
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        digest = torch.tensor([zlib.crc32(state.numpy().tobytes())], dtype=torch.int64, device=device)
        if self.exchange.gather(digest, "random numbers").unique().numel() > 1:
            raise ValueError(
                "the processes of an image draw different random numbers, but its stochastic depth or dropout must be"
                " the same in all: call `torch.manual_seed` with the same number in each"
            )


def shard(network: nn.Module, mesh: DeviceMesh) -> Sharded:
    """Divides the rows of images, or the tokens of a decoder, over the processes of a mesh; the output is the same.

    Args:
        network: RAVLT or MAViT with linear attention in all stages, CARE with strips and linear attention, DeiT, Swin
            or PVT with a swapped attention that only needs rows of its neighbours, or a decoder. On its device; the
            result has the same parameters, the network itself stays as it is.
        mesh: of one dimension, such as `init_device_mesh("cuda", (4,))` or `mesh["rows"]` of a larger one.

    Returns:
        A module that every process of the mesh calls with the same input.

    Raises ValueError for a mesh of several dimensions, a network with softmax attention, other layers whose rows cannot
    be shared, or pooling that is no average.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"`mesh` is {kind(mesh)}, expected a DeviceMesh: make it with `init_device_mesh`")
    if mesh.ndim != 1:
        raise ValueError(f"`mesh` has {mesh.ndim} dimensions, expected one: choose one by its name, as in mesh['rows']")
    check_layers(network)
    if not isinstance(network, tuple(LOGITS)):
        raise ValueError(f"`network` is of the class {type(network).__name__}: {ALTERNATIVES}")
    if not isinstance(network, Decoder):
        pool = pooling(network)
        averages = ("avg", "token") if isinstance(network, VisionTransformer) else AVERAGES
        refuse(
            (pool not in averages or getattr(network, "pool_include_prefix", False))
            and f"the pooling of `network` is {pool!r}, expected an average: create it with global_pool='avg'",
            getattr(network, "dynamic_img_size", False)
            and "`network` resizes its table of positions: create it with img_size, without dynamic_img_size",
        )
    return Sharded(network, Exchange(mesh.get_group()))


def _check_whole(network: nn.Module, x: Tensor, height: int) -> None:
    """Refuses in all processes what only some of them would refuse."""
    if isinstance(network, Decoder):
        network._check(x)
    size: Any = network.patch_embed.img_size if isinstance(network, VisionTransformer | SwinTransformer) else None
    if size is not None and (height, x.shape[-1]) != tuple(size):
        raise ValueError(
            f"the images are {height} × {x.shape[-1]} px, expected {size[0]} × {size[1]}: create the network with their"
            " size as `img_size`"
        )


def _logits_of_map(dims: tuple[int, int], network: Any, x: Tensor, rows: list[slice], exchange: Exchange) -> Tensor:
    """dims: those of the map's height and width."""
    return network.forward_head(_mean(network.forward_features(x), dims, exchange))


def _logits_of_vit(network: VisionTransformer, x: Tensor, rows: list[slice], exchange: Exchange) -> Tensor:
    """The class token is the same in all processes."""
    here, table = rows[exchange.rank], network.pos_embed
    prefix = 0 if network.no_embed_class else network.num_prefix_tokens
    places = {}
    if table is not None:
        (height, _), width = network.patch_embed.patch_size, network.patch_embed.grid_size[1]
        of_rows = slice(prefix + here.start // height * width, prefix + here.stop // height * width)
        places = {"pos_embed": torch.cat((table[:, :prefix], table[:, of_rows]), 1)}
    features = functional_call(_Features(network), {f"network.{name}": value for name, value in places.items()}, (x,))
    tokens = features[:, network.num_prefix_tokens :]
    if network.global_pool == "avg":
        tokens = _mean(tokens, (1,), exchange)
    return network.forward_head(torch.cat((features[:, : network.num_prefix_tokens], tokens), 1))


class _Features(nn.Module):
    def __init__(self, network: VisionTransformer) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network.forward_features(x)


def _logits_of_tokens(network: Decoder, x: Tensor, rows: list[slice], exchange: Exchange) -> Tensor:
    lengths = [each.stop - each.start for each in rows]
    logits = network(x)
    every = exchange.gather(pad(logits, (0, 0, 0, max(lengths) - logits.shape[1])), "logits")
    return torch.cat([some[:, :length] for some, length in zip(every, lengths, strict=True)], 1)


def _mean(x: Tensor, dims: tuple[int, ...], exchange: Exchange) -> Tensor:
    """The mean over these dimensions in all processes; they keep the length 1."""
    mean = x.to(accumulator_dtype(x.dtype)).mean(dims, keepdim=True)
    number = mean.new_tensor([x.numel() // mean.numel()])
    numbers, means = exchange.gather(torch.cat((number, mean.flatten())), "pooling").split((1, mean.numel()), 1)
    return (numbers / numbers.sum() * means).sum(0).view_as(mean).to(x.dtype)


LOGITS: dict[type[nn.Module], Callable[..., Tensor]] = {
    Backbone: partial(_logits_of_map, (2, 3)),
    PyramidVisionTransformerV2: partial(_logits_of_map, (2, 3)),
    SwinTransformer: partial(_logits_of_map, (1, 2)),
    VisionTransformer: _logits_of_vit,
    Decoder: _logits_of_tokens,
}
"""How a family makes its output from some rows of the input."""
