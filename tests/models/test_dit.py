import pytest
import torch
from diffusers import DiTTransformer2DModel

from linvit.layers.mechanisms import at
from linvit.models import dit
from linvit.models.by_name import create
from linvit.models.dit import time_features


def varied(network):
    """Weights that are nowhere zero, so that every path counts."""
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network.eval()


def inputs(network, batch=3):
    images = torch.randn(batch, network.channels, network.input_size, network.input_size)
    return images, torch.tensor([0, 500, 999])[:batch], torch.tensor([1, 9, 10])[:batch]


@pytest.mark.parametrize("mechanism", list(at("images")))
@pytest.mark.parametrize("local", [False, True])
def test_at_first_it_predicts_nothing_and_then_every_input_counts(mechanism, local):
    network = create("dit_nano_patch2", 10, mechanism=mechanism, local=local)
    images, times, labels = inputs(network)
    assert (network(images, times, labels) == 0).all()
    varied(network)
    out = network(images, times, labels)
    assert out.shape == images.shape
    for other in ((images + 1, times, labels), (images, times.flip(0), labels), (images, times, labels.flip(0))):
        assert (network(*other) - out).abs().max() > 1e-3
    out.square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in network.parameters())


def test_with_softmax_it_is_the_dit_of_diffusers():
    ours = varied(create("dit_nano_patch2", 10, learn_sigma=True))
    theirs = DiTTransformer2DModel(
        4, 16, in_channels=1, out_channels=2, num_layers=4, sample_size=8, patch_size=2, num_embeds_ada_norm=10
    ).eval()
    state = {}

    def copy(mine, their):
        state[f"{their}.weight"], state[f"{their}.bias"] = mine.weight, mine.bias

    copy(ours.patch_embed.proj, "pos_embed.proj")
    copy(ours.modulation, "proj_out_1")
    copy(ours.head, "proj_out_2")
    for number, block in enumerate(ours.blocks):
        name = f"transformer_blocks.{number}"
        copy(ours.time_embed.fc1, f"{name}.norm1.emb.timestep_embedder.linear_1")
        copy(ours.time_embed.fc2, f"{name}.norm1.emb.timestep_embedder.linear_2")
        state[f"{name}.norm1.emb.class_embedder.embedding_table.weight"] = ours.label_embed.weight
        copy(block.modulation, f"{name}.norm1.linear")
        for part, weight, bias in zip("qkv", block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True):
            state[f"{name}.attn1.to_{part}.weight"], state[f"{name}.attn1.to_{part}.bias"] = weight, bias
        copy(block.attn.proj, f"{name}.attn1.to_out.0")
        copy(block.mlp.fc1, f"{name}.ff.net.0.proj")
        copy(block.mlp.fc2, f"{name}.ff.net.2")
    theirs.load_state_dict(state)
    theirs.pos_embed.pos_embed = ours.positions[None]
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0  # as released by DiT; diffusers has 1
    images, times, labels = inputs(ours)
    with torch.no_grad():
        expected = theirs(images, times, labels).sample
        torch.testing.assert_close(ours(images, times, labels), expected, rtol=1e-4, atol=1e-4)


def test_times_are_cosines_and_sines():
    features = time_features(torch.tensor([0, 7]), torch.float64)
    assert features.shape == (2, 256)
    assert (features[0, :128] == 1).all()
    assert features[1, 128].item() == pytest.approx(0.6569866, abs=1e-6)
    assert features[1, 129].item() == pytest.approx(torch.tensor(7 * 10_000 ** (-1 / 128)).sin().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("dit_small_patch2", 33), ("dit_base_patch2", 130), ("dit_large_patch2", 458), ("dit_xlarge_patch2", 675)],
)
def test_published_sizes(name, millions):
    with torch.device("meta"):
        network = create(name, 1000, learn_sigma=True)
    parameters = sum(parameter.numel() for parameter in network.parameters()) + network.positions.numel()
    assert parameters / 1e6 == pytest.approx(millions, abs=0.52)  # the paper cuts 130.5 off
    if name == "dit_xlarge_patch2":
        assert parameters == 675_129_632  # as the released network counts, its fixed positions included


def test_every_mechanism_has_the_same_number_of_parameters():
    with torch.device("meta"):
        networks = [create("dit_small_patch2", 1000, mechanism=mechanism) for mechanism in at("images")]
    assert len({sum(parameter.numel() for parameter in network.parameters()) for network in networks}) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mechanism": "focused"}, "expected one of softmax, linear, rala, mala"),
        ({"patch_size": 3}, "`input_size` is 8, which is not a multiple of `patch_size` 3"),
        ({"width": 66, "heads": 3}, "need a multiple of 4"),
        ({"heads": 5}, "`width` is 64 and `heads` 5"),
    ],
)
def test_what_does_not_fit_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        create("dit_nano_patch2", 10, **changes)


def test_the_names_are_all_listed_in_the_page_of_the_module():
    assert all(name in dit.__doc__ for name in dit.SIZES)
