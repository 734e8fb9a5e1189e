import math

import pytest
import timm
import torch

import linvit  # noqa: F401
from linvit.analysis.measured import select
from linvit.analysis.probe import probe
from linvit.analysis.rank import SPECTRUM, matrices, measure_ranks, rank_measures
from linvit.formulas.feature_map import elu1
from linvit.ops import linear_attention
from linvit.ops.position import rotate


def with_singular_values(values, rows=9, columns=6):
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q[:, :columns]
    right = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64)).Q
    return left * torch.tensor(values, dtype=torch.float64) @ right


def test_measures_of_known_singular_values():
    found = rank_measures(with_singular_values([4, 2, 1e-1, 2e-2, 2e-3, 1e-9])[None, None])
    assert found["rank"].item() == 5
    assert found["rank_1e-3"].item() == 4
    assert found["rank_1e-2"].item() == 3
    assert found["stable"].item() == pytest.approx((16 + 4 + 1e-2 + 4e-4) / 16, rel=1e-5)
    share = [x / 6.122 for x in (4, 2, 0.1, 0.02, 0.002, 1e-9)]
    assert found["effective"].item() == pytest.approx(math.exp(-sum(x * math.log(x) for x in share)), rel=1e-5)
    torch.testing.assert_close(
        found[SPECTRUM][0, 0],
        torch.tensor([1, 0.5, 0.025, 0.005, 5e-4, 2.5e-10], dtype=torch.float64),
        atol=1e-14,
        rtol=0,
    )


def test_default_rank_is_that_of_torch_in_float32():
    matrix = torch.randn(3, 2, 12, 8) * 10.0 ** -torch.arange(8)
    expected = torch.linalg.matrix_rank(matrix)
    assert expected.min() < 8
    assert torch.equal(rank_measures(matrix)["rank"], expected.double())


def test_all_equal_and_all_zero():
    orthogonal, zero = rank_measures(torch.eye(5)[None, None]), rank_measures(torch.zeros(1, 1, 5, 7))
    for name in ("rank", "rank_1e-3", "rank_1e-2", "effective", "stable"):
        assert orthogonal[name].item() == pytest.approx(5)
        assert zero[name].item() == 0
    assert not zero[SPECTRUM].any()


def test_the_kv_state_is_what_queries_read():
    one = probe(timm.create_model("ravlt_nano").double(), torch.randn(2, 3, 64, 64, dtype=torch.float64))[0]
    operands = one.operands
    options = {**operands.options, "normalizer": "none"}
    read = linear_attention(operands.query, operands.key, operands.value, rotary=operands.rotary, **options)
    torch.testing.assert_close(rotate(elu1(operands.query), operands.rotary) @ one.kv_state(), read)


def test_the_kv_state_of_hydra_is_diagonal_in_the_heads_that_were_asked_for():
    network = timm.create_model("deit_tiny_hydra", img_size=64, embed_dim=24, depth=1).double()
    one = probe(network, torch.randn(2, 3, 64, 64, dtype=torch.float64))[0]
    query, key = (torch.nn.functional.normalize(x, dim=1).squeeze(-1) for x in (one.operands.query, one.operands.key))
    means = (key * one.operands.value.squeeze(-1)).mean(-1).unflatten(1, (3, 8))
    torch.testing.assert_close(one.kv_state(), means.diag_embed())
    read = (query.mT.unflatten(-1, (3, 8)).transpose(1, 2) @ one.kv_state()) * 17
    torch.testing.assert_close(read, one.outputs())


def test_ranks_of_every_layer_matrix_head_and_image():
    network = timm.create_model("mavit_nano", pattern="LLSS")
    images = torch.randn(3, 3, 64, 64)
    found = measure_ranks(network, images.split(2))
    assert [(one.layer.mechanism, one.condition["matrix"]) for one in found][:8] == [
        *(("mala", name) for name in ("state", "mixed", "local", "modulated")),
        *(("mala", name) for name in ("state", "mixed", "local", "modulated")),
    ]
    assert not select(found[8:], matrix="state")
    assert found[0].values["rank"].shape == (3, 2)
    assert found[0].values[SPECTRUM].shape == (3, 2, 16)
    first = probe(network, images)[0]
    for name, matrix in matrices(first).items():
        (one,) = (x for x in select(found, matrix=name) if x.layer.name == first.name)
        expected = rank_measures(matrix)
        assert torch.equal(one.values["rank_1e-2"], expected["rank_1e-2"])
