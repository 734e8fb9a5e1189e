"""Every argument of the analyses, of `fuse` and of the kernels' face with wrong values: one sentence that names it."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

from linvit.allocator import keep_memory
from linvit.analysis.cost import count_batch, count_cost, count_pass
from linvit.analysis.magnitude import compare_readouts, measure_magnitude
from linvit.analysis.probe import attention_layers, probe, visit
from linvit.analysis.rank import measure_ranks, rank_measures
from linvit.analysis.scores import entropy, measure_scores, score_maps, score_measures
from linvit.fusion import fuse

IMAGES = torch.zeros(1, 3, 32, 32)
QUERY = torch.ones(1, 1, 4, 16)
NETWORK = timm.create_model("ravlt_nano").eval()
ODD = {
    "nothing": None,
    "text": "ravlt_nano",
    "number": 1.5,
    "whole": 3,
    "NaN": float("nan"),
    "list": [1],
    "array": np.zeros((1, 3, 32, 32)),
    "mapping": {},
    "class": nn.Linear,
}
TENSORS = {"empty": IMAGES[:0, :0], "zero axes": torch.tensor(1.0), "sparse": IMAGES.to_sparse()}
MATRICES = {
    "one axis": torch.ones(0),
    "integers": torch.ones(2, 2, 2, 2, dtype=torch.long),
    "sparse": TENSORS["sparse"],
}
NETWORKS = {**ODD, "tensor": IMAGES}
BATCHES = {name: x for name, x in ODD.items() if name not in ("list", "array")} | {"tensor": IMAGES}
INPUTS = {**ODD, "sparse": TENSORS["sparse"], "zero axes": TENSORS["zero axes"], "in a tuple": (IMAGES.numpy(),)}
LAYERS = {name: x for name, x in ODD.items() if x is not None} | {"unknown": ["stem"]}
FACTORS = {**ODD, "list": [], "negative": [-1.0], "of text": ["1"], "tensor": IMAGES}
POINTS = {**ODD, "outside": (0.5, 1.5), "negative": (-0.1, 0.5), "three": (0.1, 0.2, 0.3), "tensor": IMAGES}
SIZES = {**ODD, "negative": (3, -32, 32), "no channels": (0, 32, 32), "two": (32, 32), "tensor": IMAGES}
NUMBERS = {name: x for name, x in ODD.items() if name != "whole"} | {"none": 0, "too many": 2**31, "truth": True}
DENSE = {
    **ODD,
    "zero axes": TENSORS["zero axes"],
    "sparse": TENSORS["sparse"],
    "three axes": QUERY[0],
    "whole numbers": QUERY.long(),
}
CASES = [
    (fuse, {"model": NETWORK}, "model", NETWORKS | {"training": nn.Linear(2, 2)}),
    (count_cost, {"network": NETWORK, "input_size": (3, 32, 32)}, "network", NETWORKS),
    (count_cost, {"network": NETWORK, "input_size": (3, 32, 32)}, "input_size", SIZES),
    (count_batch, {}, "network", NETWORKS),
    (count_pass, {}, "network", NETWORKS),
    (attention_layers, {}, "network", NETWORKS),
    (visit, {"network": NETWORK, "inputs": IMAGES, "look": print}, "inputs", INPUTS),
    (visit, {"network": NETWORK, "inputs": IMAGES}, "look", {k: x for k, x in ODD.items() if k != "class"}),
    (probe, {"network": NETWORK, "inputs": IMAGES}, "layers", LAYERS),
    (rank_measures, {}, "matrix", ODD | MATRICES),
    (entropy, {}, "scores", ODD | MATRICES),
    (score_measures, {}, "scores", ODD | MATRICES | {"three axes": QUERY[0]}),
    (score_maps, {"network": NETWORK, "inputs": IMAGES}, "point", POINTS),
    (score_maps, {"network": NETWORK, "point": (0.5, 0.5)}, "inputs", INPUTS),
    (measure_ranks, {"network": NETWORK}, "batches", BATCHES),
    (measure_scores, {"network": NETWORK}, "batches", BATCHES),
    (measure_magnitude, {"network": NETWORK, "batches": [IMAGES]}, "factors", FACTORS),
    (compare_readouts, {}, "probe", NETWORKS),
    (keep_memory, {}, "limit", NUMBERS),
]


def test_a_wrong_argument_is_named():
    for function, options, argument, values in CASES:
        for name, wrong in values.items():
            with pytest.raises((TypeError, ValueError)) as caught:
                function(**{**options, argument: wrong})
            sentence = str(caught.value)
            assert f"`{argument}" in sentence, (function, name)
            assert "expected" in sentence, (function, name)


def test_inputs_of_a_count_are_tensors():
    for count in (count_batch, count_pass):
        for wrong in ODD.values():
            with pytest.raises(TypeError, match=r"`inputs\[0\]` is .*expected a tensor"):
                count(NETWORK, wrong)


def test_a_fused_network_and_one_that_nothing_is_folded_in_can_be_fused():
    x = torch.randn(2, 3, 32, 32)
    twice = fuse(fuse(NETWORK))
    torch.testing.assert_close(twice(x), NETWORK(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(fuse(nn.ReLU().eval())(x), x.relu())
