"""What the released networks compute, and the parameters and input from which they compute it.

tests/golden/ holds one file a network, compact: `state_dict` lists the released keys and shapes, blocks of one stage
together; a stage's or the logits' `value` are 64 values at evenly spaced flat positions. Parameters and input follow
from a rule (below), in float64, so anyone can make them again.
"""

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.testing import assert_close

FOLDER = Path(__file__).parent / "golden"

NAMES = {
    "RAVLT_T": "ravlt_tiny",
    "RAVLT_S": "ravlt_small",
    "RAVLT_B": "ravlt_base",
    "RAVLT_L": "ravlt_large",
    "MALA_T": "mavit_tiny",
    "MALA_S": "mavit_small",
    "MALA_B": "mavit_base",
    "MALA_L": "mavit_large",
    "CARETrans_S0": "care_s0",
    "CARETrans_S1": "care_s1",
    "CARETrans_S2": "care_s2",
}


def golden(released_name: str) -> dict:
    """The recorded numbers of one released network."""
    return json.loads((FOLDER / f"{released_name}.json").read_text())


def released_keys(record: dict) -> list[tuple[str, tuple[int, ...], bool]]:
    """(key, shape, whether it is a counter) in the order of the released state dict, checked against its hash."""
    keys = []
    for group in record["state_dict"]:
        first, last = group["blocks"]
        for block in range(first, last + 1):
            for suffix, shape in group["keys"].items():
                counter = shape == "count"
                sides = () if counter else tuple(map(int, shape.split("x")))
                keys.append((group["prefix"].format(block) + suffix, sides, counter))
    listing = "\n".join(f"{key} {shape} {'int64' if counter else 'float64'}" for key, shape, counter in keys)
    assert hashlib.sha256(listing.encode()).hexdigest() == record["state_dict_sha256"]
    return keys


def released_state_dict(record: dict) -> dict[str, Tensor]:
    """The released network's state dict by the rule, float64."""
    return {
        key: torch.tensor(0) if counter else torch.from_numpy(_value(key, shape))
        for key, shape, counter in released_keys(record)
    }


def released_input(record: dict) -> Tensor:
    """The input by the rule, float64."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal(record["input_shape"]))


def filled(parameters: list) -> dict[str, Tensor]:
    """[key, shape] pairs as a state dict by the rule, float64."""
    return {key: torch.from_numpy(np.asarray(_value(key, tuple(shape)))) for key, shape in parameters}


def assert_recorded(tensor: Tensor, expected: dict, tolerance: float = 1e-10) -> None:
    """Shape, values, mean and deviation are those of a record."""
    assert list(tensor.shape) == expected["shape"]
    values = torch.tensor(expected["value"], dtype=torch.float64)
    largest = values.abs().max().item()
    assert_close(tensor.flatten()[expected["index"]], values, rtol=tolerance, atol=tolerance * largest)
    assert_close(tensor.mean().item(), expected["mean"], rtol=tolerance, atol=tolerance / 100)
    assert_close(tensor.std(correction=0).item(), expected["std"], rtol=tolerance, atol=0)


def probe(tensor: Tensor, size: int = 64) -> np.ndarray:
    """Values at evenly spaced flat positions in row-major order."""
    flat = tensor.detach().contiguous().flatten().numpy()
    return flat[np.linspace(0, flat.size - 1, size).astype(int)]


def _value(key: str, shape: tuple[int, ...]) -> np.ndarray:
    last = key.rsplit(".", 1)[-1]
    if last == "angle":
        return np.repeat(1 / 10000 ** np.linspace(0, 1, shape[0] // 2), 2)
    noise = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape)
    if last == "running_var":
        return 1 + 0.5 * np.abs(noise)
    if last in ("running_mean", "bias"):
        return 0.1 * noise
    if last in ("gamma", "gamma_1", "gamma_2"):
        return 0.1 * (1 + 0.1 * noise)
    if len(shape) == 1:
        return 1 + 0.1 * noise
    return noise / np.sqrt(np.prod(shape[1:]))
