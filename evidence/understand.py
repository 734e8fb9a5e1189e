"""The figures of the pages in docs/understand.

Each computes what it shows with linvit's own functions, from the patches of a photo that comes with scikit-learn.
"""

import math

import torch
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn import functional

from evidence.rows import ROOT
from linvit.analysis.figures import SMALL, WIDTH, colour_of, plain_ticks, subplots, svg
from linvit.analysis.scores import entropy
from linvit.files import write_text
from linvit.layers.mechanisms import LINEAR_AXES
from linvit.ops import attention_scores
from linvit.ops.mixing import blocks_of_grid, initial_mixing

PAGES = ROOT / "docs" / "understand"
SHOWN = ("softmax", "linear", "rala", "mala")
GRID, PATCH = (26, 40), 16
BLOCKS = (4, 4)  # of MHLA
POINT = (16, 12)  # of the query, in patches
CHANNELS = 16
LENGTH = 2.5  # of queries and keys, on average
FACTORS = [2.0**exponent for exponent in range(-3, 6)]


def photo() -> Tensor:
    """(height, width, 3) in 0..1, a whole number of patches."""
    image = torch.from_numpy(load_sample_image("china.jpg").copy()).double() / 255
    return image[: GRID[0] * PATCH, : GRID[1] * PATCH]


def tokens(image: Tensor) -> Tensor:
    """Queries and keys of all patches, (1, 1, tokens, CHANNELS): their main components, at LENGTH on average."""
    patches = image.permute(2, 0, 1)[None]
    columns = functional.unfold(functional.avg_pool2d(patches, 4), PATCH // 4, stride=PATCH // 4)[0].T
    columns = columns - columns.mean(0)
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    features = left[:, :CHANNELS] * values[:CHANNELS].sqrt()
    scaled: Tensor = LENGTH * features / features.norm(dim=1).mean()
    return scaled[None, None]


def scores(mechanism: str, query: Tensor, key: Tensor) -> Tensor:
    """The score matrix (tokens, tokens) of a mechanism, without rotation."""
    if mechanism == "softmax":
        return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)[0, 0]
    axes = dict(LINEAR_AXES[mechanism])
    if mechanism == "mhla":
        axes |= {"mixing": initial_mixing(BLOCKS).to(query), "blocks": BLOCKS, "grid": GRID}
    return attention_scores(query, key, **axes)[0, 0]


def order_figure() -> Figure:
    """The products of softmax and of linear attention as rectangles."""
    figure, panels = subplots((WIDTH, 1.9), 1, 2)
    n, d = 9.0, 2.6
    softmax = [("Q", n, d), ("Kᵀ", d, n), ("scores", n, n), ("V", n, d)]
    linear = [("κ(Q)", n, d), ("κ(K)ᵀ", d, n), ("V", n, d)]
    _products(panels[0], softmax, "Softmax: N × N scores, then times V", colour_of("softmax"), 2)
    _products(panels[1], linear, "Linear: κ(K)ᵀ V first, d × d numbers", colour_of("linear"), None)
    return figure


def _products(axes: Axes, matrices: list[tuple[str, float, float]], title: str, colour: str, dark: int | None) -> None:
    x = 0.0
    for number, (name, height, width) in enumerate(matrices):
        fill = colour if number == dark else "none"
        axes.add_patch(Rectangle((x, -height / 2), width, height, facecolor=fill, edgecolor=colour, alpha=0.8))
        inside = "white" if number == dark else "black"
        axes.text(x + width / 2, 0, name, ha="center", va="center", fontsize=SMALL, color=inside)
        joint = {0: "·", 1: "→" if dark else "·", 2: "·"}.get(number)
        if joint and number < len(matrices) - 1:
            axes.text(x + width + 0.7, 0, joint, ha="center", va="center", fontsize=12)
        x += width + 1.4
    if dark is None:
        axes.add_patch(Rectangle((x, -1.3), 2.6, 2.6, facecolor=colour, edgecolor=colour))
        axes.text(x + 1.3, 1.8, "state", ha="center", fontsize=SMALL)
        axes.text(x - 0.7, 0, "→", ha="center", va="center", fontsize=12)
        axes.plot([4.0, 4.0, x - 1.4, x - 1.4], [5.0, 5.4, 5.4, 5.0], color=colour, linewidth=1)
    axes.set_title(title, fontsize=SMALL)
    axes.set_xlim(-0.3, 27.6)
    axes.set_ylim(-4.8, 5.8)
    axes.set_aspect("equal")
    axes.axis("off")


def cost_figure() -> Figure:
    """Products inside the attention over the number of tokens, for heads of 64 channels."""
    figure, axes = subplots((WIDTH * 0.72, 2.8))
    numbers = [2**exponent for exponent in range(4, 17)]
    channels = width = 64
    axes.plot(numbers, [2 * n * n * channels for n in numbers], color=colour_of("softmax"), label="softmax: 2 N² C")
    linear = [2 * n * channels * width + n * channels for n in numbers]
    axes.plot(numbers, linear, color=colour_of("linear"), label="linear: 2 N C d + N C")
    axes.axvline(width, color="#999999", linestyle=":", linewidth=1)
    axes.text(width * 1.1, 2e10, "N = d", fontsize=SMALL)
    for side in (224, 1024):
        n = (side // 16) ** 2
        axes.plot(
            [n, n], [2 * n * channels * width, 2 * n * n * channels], "o-", color="#BBBBBB", markersize=3, zorder=0
        )
        axes.text(n, 2.6 * n * n * channels, f"{side} px,\npatches of 16", fontsize=SMALL, ha="right", va="bottom")
    axes.set(xscale="log", yscale="log", xlabel="tokens N", ylabel="multiply-accumulates")
    plain_ticks(axes.xaxis)
    axes.legend(frameon=False, fontsize=SMALL, loc="lower right")
    return figure


def map_figure() -> Figure:
    """The scores of one query over the photo, mechanism by mechanism."""
    image, place = photo(), POINT[0] * GRID[1] + POINT[1]
    query = tokens(image)
    figure, grid = subplots((WIDTH, 5.1), 3, 3)
    panels = list(grid.flat)
    panels[0].imshow(image.numpy())
    panels[0].set_title("photo and query", fontsize=SMALL)
    for axes, mechanism in zip(panels[1:], (*SHOWN, "mhla"), strict=False):
        row = scores(mechanism, query, query)[place]
        share = entropy(row).item() / math.log(len(row))
        _map(axes, row, f"{mechanism}, entropy {share:.2f}", mechanism)
    _map(panels[6], _weights(query)[0, 0], "weights α of rala", "rala")
    block = blocks_of_grid(GRID, BLOCKS, prefix=0).of_token()
    weights = initial_mixing(BLOCKS)[block[place]][block]
    _map(panels[7], weights / weights.sum(), "weights of blocks in mhla", "mhla")
    for axes, unit in zip((*panels[:6], panels[7]), (PATCH, *(1,) * 6), strict=True):
        y, x = ((c + 0.5) * unit for c in POINT)
        axes.plot(x, y, "o", color="white", markeredgecolor="black", markersize=5)
    for axes in panels:
        axes.axis("off")
    return figure


def _map(axes: Axes, row: Tensor, title: str, mechanism: str) -> None:
    """One number per token, times their number; the largest hundredth has the last colour."""
    values = row.reshape(GRID) * len(row)
    largest = values.abs().flatten().quantile(0.99).item()
    extent = (0, GRID[1], GRID[0], 0)
    shown = axes.imshow(values, cmap="RdBu_r", norm=TwoSlopeNorm(0, -largest, largest), extent=extent)
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.75, format="%.2g", extend="both")
    bar.ax.tick_params(labelsize=SMALL - 2)
    axes.set_title(title, fontsize=SMALL, color=colour_of(mechanism))


def _weights(query: Tensor) -> Tensor:
    """RALA's weights of the tokens, (1, 1, tokens), if queries and keys are equal."""
    mapped = functional.elu(query) + 1
    return (mapped.mean(-2, keepdim=True) @ mapped.mT / math.sqrt(CHANNELS)).softmax(-1)[..., 0, :]


def magnitude_figure() -> Figure:
    """Entropy of the scores as all queries grow, and the largest score."""
    key = tokens(photo())
    figure, panels = subplots((WIDTH, 2.6), 1, 2)
    for mechanism in SHOWN:
        shares, shown = [], []
        for factor in FACTORS:
            query = factor * key if mechanism == "softmax" else key
            rows = scores(mechanism, query, key) if mechanism == "softmax" else _scaled(mechanism, key, factor)
            shares.append(entropy(rows).mean().item() / math.log(rows.shape[-1]))
            shown.append(rows.max(-1).values.mean().item())
        style = {"color": colour_of(mechanism), "marker": ".", "label": mechanism}
        panels[0].plot(FACTORS, shares, **style)
        panels[1].plot(FACTORS, shown, **style)
    panels[0].set_title("entropy of |A|/Σ|A|, over log N", fontsize=SMALL)
    panels[1].set_title("largest score of a row", fontsize=SMALL)
    panels[1].set_yscale("log")
    for axes in panels:
        axes.set_xscale("log", base=2)
        plain_ticks(axes.xaxis)
        axes.set_xlabel("a: κ(q), for softmax q, is multiplied by it")
    panels[0].legend(frameon=False, fontsize=SMALL)
    return figure


def _scaled(mechanism: str, key: Tensor, factor: float) -> Tensor:
    """The scores with κ(q) multiplied by a factor; the weights of the tokens stay those of the queries as they are."""
    query = functional.elu(key) + 1
    axes = {**LINEAR_AXES[mechanism], "feature_map": (lambda x: factor * x, "elu1")}
    if axes.pop("weighting", None):
        axes["weighting"] = _weights(key)
    return attention_scores(query, key, **axes)[0, 0]


FIGURES = {"order": order_figure, "cost": cost_figure, "maps": map_figure, "magnitude": magnitude_figure}


def write() -> None:
    """Draws them."""
    for name, figure in FIGURES.items():
        write_text(PAGES / f"{name}.svg", svg(figure()))
