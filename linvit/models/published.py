"""Sizes, costs and accuracies from papers and their repositories, for the networks that linvit registers."""

from typing import NamedTuple


class Published(NamedTuple):
    """Millions of parameters, billions of MACs (FLOPs in the papers), ImageNet-1k top-1 in % at 224 px, and the source.

    None: not in the table of the source. Values have the digits of the source.
    """

    parameters: str | None
    macs: str | None
    top1: float
    source: str


# Columns as in Published, after the network's name. For RAVLT and MAViT the accuracy belongs to pattern LLSS.
TABLE = """
ravlt_tiny                      –    –  82.8  RALA
ravlt_small                     –    –  84.4  RALA
ravlt_base                      –    –  85.5  RALA
ravlt_large                     –    –  85.8  RALA
mavit_tiny                      –    –  82.9  MALA
mavit_small                     –    –  84.7  MALA
mavit_base                      –    –  85.7  MALA
mavit_large                     –    –  86.0  MALA
care_s0                         –    –  78.4  CARE
care_s1                         –    –  80.1  CARE
care_s2                         –    –  82.1  CARE
deit_tiny_softmax             5.7  1.2  72.2  FLatten, Table 3
deit_tiny_hydra               5.7  1.1  68.3  FLatten, Table 3
deit_tiny_efficient           5.7  1.1  70.2  FLatten, Table 3
deit_tiny_linear_angular      5.7  1.1  70.8  FLatten, Table 3
deit_tiny_enhanced            5.8  1.1  72.9  FLatten, Table 3
deit_tiny_focused             6.1  1.1  74.1  FLatten, Table 3
deit_tiny_linear              5.7    –  70.5  FLatten, Table 4
deit_tiny_inline              6.5  1.1  74.5  InLine, repository
deit_tiny_agent               6.0  1.2  74.9  Agent, repository
deit_tiny_softmax_unit_query    –    –  70.0  MALA, Table 1
deit_tiny_mala                  –    –  75.1  MALA, Table 9
swin_tiny_softmax              29  4.5  81.3  FLatten, Table 3
swin_tiny_hydra                29  4.5  80.7  FLatten, Table 3
swin_tiny_efficient            29  4.5  81.0  FLatten, Table 3
swin_tiny_linear_angular       29  4.5  79.4  FLatten, Table 3
swin_tiny_enhanced             29  4.5  81.8  FLatten, Table 3
swin_tiny_focused              29  4.5  82.1  FLatten, Table 3
swin_tiny_inline               30  4.5  82.4  InLine, repository
swin_tiny_agent                29  4.5  82.6  Agent, repository
swin_tiny_mala                  –    –  83.7  MALA, Table 9
swin_small_softmax             50    –  83.0  FLatten, Table 3
swin_small_focused             51  8.7  83.5  FLatten, Table 3
swin_small_inline              50  8.7  83.6  InLine, repository
swin_small_agent               50  8.7  83.7  Agent, repository
swin_small_mala                 –    –  85.3  MALA, Table 9
"""


def _row(line: str) -> tuple[str, Published]:
    name, parameters, macs, top1, source = line.split(maxsplit=4)
    return name, Published(_known(parameters), _known(macs), float(top1), source)


def _known(value: str) -> str | None:
    return None if value == "–" else value


PUBLISHED = dict(map(_row, TABLE.strip().splitlines()))

# Millions of parameters and billions of MACs of each size as RALA and MALA print them, for backbones of pattern LLSS.
PUBLISHED_DENSE: dict[str, tuple[tuple[int, int] | None, ...]] = {
    "retinanet": ((24, 201), (34, 244), (57, 353), (104, 482)),
    "mask_rcnn": ((33, 219), (44, 262), (67, 372), (114, 501)),
    "cascade_mask_rcnn": (None, (82, 741), (105, 851), (152, 979)),
    "semantic_fpn": ((18, 136), (28, 180), (51, 292), (98, 424)),
    "upernet": ((44, 893), (55, 937), (77, 1050), (125, 1182)),
}
