"""Ranks of the KV state and the outputs of attention (RALA, CVPR 2025, figures 2, 4, 5 and 8).

The paper does not state a tolerance, and the result depends on it, so there are several measures.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from linvit.analysis.measured import Measured, Values, check_matrix, gather
from linvit.analysis.probe import LOCAL, MIXED, MODULATED, Inputs, Probe

STATE = "state"
MATRICES = (STATE, MIXED, LOCAL, MODULATED)
TOLERANCES = {"rank": None, "rank_1e-3": 1e-3, "rank_1e-2": 1e-2}
"""Measure → smallest singular value that counts, over the largest; None for torch.linalg.matrix_rank's in float32."""
SPECTRUM = "spectrum"


def rank_measures(matrix: Tensor) -> dict[str, Tensor]:
    """The measures of matrices (…, rows, columns), each (…), and their spectrum (…, min(rows, columns)).

    rank: singular values above max(rows, columns) · 2⁻²³ of the largest, `torch.linalg.matrix_rank`'s default for
    float32. rank_1e-3, rank_1e-2: above that share of the largest. effective: exp of the entropy of σ/Σσ (Roy and
    Vetterli, 2007). stable: Σσ²/σ₁². spectrum: σ/σ₁. A matrix of zeros has rank 0 by every measure.

    The singular values are computed in float64, whatever the matrix's dtype.
    """
    check_matrix("matrix", matrix)
    values = torch.linalg.svdvals(matrix.double())
    largest = values[..., :1]
    relative = torch.where(largest > 0, values / largest.clamp_min(torch.finfo(values.dtype).tiny), 0)
    default = max(matrix.shape[-2:]) * torch.finfo(torch.float32).eps
    measures = {
        name: (relative > (default if tolerance is None else tolerance)).sum(-1).double()
        for name, tolerance in TOLERANCES.items()
    }
    share = relative / relative.sum(-1, keepdim=True).clamp_min(1)  # σ₁/σ₁ = 1 is among them
    zero = largest[..., 0] == 0
    measures["effective"] = torch.special.entr(share).sum(-1).exp().masked_fill(zero, 0)
    measures["stable"] = relative.square().sum(-1)
    return {**measures, SPECTRUM: relative}


def matrices(probe: Probe) -> dict[str, Tensor]:
    """The KV state of a linear attention, and its features over the image's tokens after each step (no class token).

    Attention by blocks has no single state.
    """
    options = probe.operands.options
    state = {} if options is None or "mixing" in options else {STATE: probe.kv_state()}
    return state | {name: x[:, :, probe.num_prefix :] for name, x in probe.features.items()}


def measure_ranks(network: nn.Module, batches: Iterable[Inputs], layers: Sequence[str] | None = None) -> list[Measured]:
    """The measures of every attention over more than one token, for each image and head; condition: {"matrix": …}.

    Args:
        network: as in `visit`.
        batches: inputs as in `visit`.
        layers: names of layers, all by default.
    """

    def ranks(probe: Probe) -> Values:
        for name, matrix in matrices(probe).items():
            yield {"matrix": name}, rank_measures(matrix)

    return gather(network, batches, layers, ranks)
