"""Memory and time of a segmentor as images grow, linear in all stages against softmax in two."""

from collections.abc import Sequence
from dataclasses import dataclass

from linvit.bench import inference
from linvit.bench.options import NetworkOptions, Size
from linvit.bench.page import OF_NETWORKS
from linvit.models.dense.frameworks import SEGMENTORS
from linvit.ranges import Count, check_names


@dataclass(frozen=True)
class Options(NetworkOptions):
    """`names` are backbones in `framework`; sizes are (height, width)."""

    names: Sequence[str] = ("ravlt_tiny", "ravlt_tiny_linear")
    variants: Sequence[str] = ("plain",)
    peers: Sequence[str] = ()
    framework: str | None = "semantic_fpn"
    sizes: Sequence[Size] = ((256, 1024), (384, 1536), (512, 2048), (768, 3072))
    rounds: Count = 3
    memory: bool = True

    def __post_init__(self) -> None:
        inference.check_options(self)
        check_names("framework", [str(self.framework)], SEGMENTORS)


measure, COLUMNS = inference.measure, OF_NETWORKS
