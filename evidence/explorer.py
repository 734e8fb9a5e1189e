"""Builds the explorer: the page, its networks as ONNX files, and the runtime from npm's packages, in one folder."""

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from linvit.analysis.probe import attention_layers
from linvit.deploy.formats import FORMATS
from linvit.deploy.graph import OnPixels, exported, sample
from linvit.explorer.serving import PAGE
from linvit.files import write_json
from linvit.layers.operator import AttentionLayer

NETWORKS = {"mavit_nano.cifar10": "MAViT, trained with MALA", "ravlt_nano.cifar10": "RAVLT, trained with RALA"}
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
LICENCES = ("LICENSE", "ThirdPartyNotices.txt")  # of ONNX Runtime and what it is linked with; npm's package lacks them
SIZE = (128, 128)


class WithTokens(nn.Module):
    """A network that also returns the tokens of its attention layers.

    forward: images to the network's output, then for each layer queries, keys and values as one tensor
    (3, batch, heads, tokens, width). Queries and keys are not rotated and no feature map is applied to them.
    """

    def __init__(self, network: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self.network = network
        self._tokens: list[Tensor] = []
        for layer in layers:
            operator = cast(AttentionLayer, network.get_submodule(layer)).operator
            operator.register_forward_pre_hook(self._keep)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        self._tokens.clear()
        output = self.network(images)
        return output, *self._tokens

    def _keep(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._tokens.append(torch.stack(inputs[:3]))


def on_pixels(network: nn.Module) -> OnPixels:
    """A classifier of timm that reads uint8 images and returns logits and tokens, see `WithTokens`."""
    config = cast(dict[str, Any], network.pretrained_cfg)
    return OnPixels(WithTokens(network.eval(), attention_layers(network)), config["mean"], config["std"])


def build(folder: Path, packages: Path) -> None:
    """Writes the explorer into a folder, replacing what is there, which is kept if this fails.

    Args:
        folder: new, or of an earlier build.
        packages: npm's folder node_modules with onnxruntime-web.

    Raises FileNotFoundError if a file of the runtime is missing.
    """
    import onnxruntime  # for its licences

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(PAGE, temporary)
    (temporary / "runtime").mkdir()
    for name in RUNTIME:
        shutil.copy(packages / "onnxruntime-web" / "dist" / name, temporary / "runtime" / name)
    for name in LICENCES:
        shutil.copy(Path(onnxruntime.__file__).with_name(name), temporary / "runtime" / name)
    (temporary / "networks").mkdir()
    write_json(temporary / "networks" / "networks.json", [write_network(name, temporary) for name in NETWORKS])
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def write_network(name: str, folder: Path) -> dict[str, Any]:
    """Writes a network with bundled weights to folder/networks/NAME.onnx; returns what the page has to know of it."""
    network = timm.create_model(name, pretrained=True)
    layers = attention_layers(network)
    path = folder / "networks" / f"{name}.onnx"
    with_tokens = on_pixels(network)
    program = exported(with_tokens, sample(3, SIZE, dynamic=True), dynamic=True)
    outputs = [f"layer{number}" for number in range(len(layers))]
    FORMATS[path.suffix].write(program, name, path, ["images"], ["logits", *outputs])
    config = cast(dict[str, Any], network.pretrained_cfg)
    with torch.no_grad():
        _, *tokens = with_tokens(torch.zeros(1, 3, *SIZE, dtype=torch.uint8))
    return {
        "file": path.name,
        "name": name,
        "label": NETWORKS[name],
        "classes": list(config["label_names"]),
        "size": config["input_size"][-1],
        "layers": list(map(_layer, outputs, layers, [tuple(x.shape) for x in tokens])),
    }


def _layer(output: str, name: str, shape: Sequence[int]) -> dict[str, Any]:
    stride = SIZE[0] // math.isqrt(shape[-2])
    return {"output": output, "name": name, "heads": shape[2], "width": shape[-1], "stride": stride}


if __name__ == "__main__":
    build(Path(sys.argv[2]), Path(sys.argv[1]))
