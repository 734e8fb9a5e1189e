"""What papers and their repositories print beside the networks that linvit registers."""

from typing import NamedTuple


class Published(NamedTuple):
    """parameters in millions, giga-MACs (which the papers call FLOPs), ImageNet-1k top-1 in percent at 224 px, source.

    None stands for what has not been read in a source. Values have the digits of the source.
    """

    parameters: str | None
    macs: str | None
    top1: float | None
    source: str


def _table(source: str, rows: dict[str, tuple[str | None, str | None, float]]) -> dict[str, Published]:
    return {name: Published(*row, source) for name, row in rows.items()}


SWAPPED = {
    **_table(
        "FLatten, Table 3",
        {
            "deit_tiny_softmax": ("5.7", "1.2", 72.2),
            "deit_tiny_hydra": ("5.7", "1.1", 68.3),
            "deit_tiny_efficient": ("5.7", "1.1", 70.2),
            "deit_tiny_linear_angular": ("5.7", "1.1", 70.8),
            "deit_tiny_enhanced": ("5.8", "1.1", 72.9),
            "deit_tiny_focused": ("6.1", "1.1", 74.1),
            "swin_tiny_softmax": ("29", "4.5", 81.3),
            "swin_tiny_hydra": ("29", "4.5", 80.7),
            "swin_tiny_efficient": ("29", "4.5", 81.0),
            "swin_tiny_linear_angular": ("29", "4.5", 79.4),
            "swin_tiny_enhanced": ("29", "4.5", 81.8),
            "swin_tiny_focused": ("29", "4.5", 82.1),
            "swin_small_softmax": ("50", None, 83.0),
            "swin_small_focused": ("51", "8.7", 83.5),
        },
    ),
    **_table("FLatten, Table 4", {"deit_tiny_linear": ("5.7", None, 70.5)}),
    **_table(
        "InLine, repository",
        {
            "deit_tiny_inline": ("6.5", "1.1", 74.5),
            "swin_tiny_inline": ("30", "4.5", 82.4),
            "swin_small_inline": ("50", "8.7", 83.6),
        },
    ),
    **_table(
        "Agent, repository",
        {
            "deit_tiny_agent": ("6.0", "1.2", 74.9),
            "swin_tiny_agent": ("29", "4.5", 82.6),
            "swin_small_agent": ("50", "8.7", 83.7),
        },
    ),
    **_table("MALA, Table 1", {"deit_tiny_softmax_unit_query": (None, None, 70.0)}),
    **_table(
        "MALA, Table 9",
        {
            "deit_tiny_mala": (None, None, 75.1),
            "swin_tiny_mala": (None, None, 83.7),
            "swin_small_mala": (None, None, 85.3),
        },
    ),
}
