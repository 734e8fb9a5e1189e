import pytest
import timm
from test_all_models import create, image, visible
from torch.testing import assert_close


def test_published_weights_are_named():
    for name, hub, file in (
        ("ravlt_tiny", "aldjalkdf/RAVLT", "RAVLT_T.pth"),
        ("ravlt_large", "aldjalkdf/RAVLT", "RAVLT_L.pth"),
        ("mavit_base", "aldjalkdf/MAViT", "MAViT_B.pth"),
    ):
        cfg = timm.get_pretrained_cfg(name)
        assert (cfg.hf_hub_id, cfg.hf_hub_filename, cfg.tag) == (hub, file, "in1k")
    assert not timm.get_pretrained_cfg("ravlt_tiny_linear").has_weights


def test_stochastic_depth_rises_to_the_released_rate():
    model = timm.create_model("ravlt_base", device="meta")
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.4 * i / 27 for i in range(28)])


def test_layer_scales_start_as_released():
    model = timm.create_model("mavit_base")
    assert [stage.blocks[0].gamma_1.mean().item() for stage in model.stages] == pytest.approx([1, 1, 1e-6, 1e-6])


def test_concatenating_pool_doubles_what_the_classifier_reads():
    model, x = visible(create("ravlt_nano", global_pool="catavgmax", num_classes=3)), image(64, 64)
    assert model(x).shape == (2, 3)
    assert model.head_hidden_size == 2 * model.num_features
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape[1] == model.head_hidden_size


def test_without_pooling_the_classifier_reads_every_position():
    model, x = visible(create("mavit_nano", num_classes=3)), image(64, 96)
    weights, logits = model.state_dict(), model(x)
    model.reset_classifier(3, "")
    model.load_state_dict(weights)
    assert model(x).shape == (2, 3, 2, 3)
    assert_close(model(x).mean((2, 3)), logits)


def test_final_convolution_goes_with_the_norm():
    model, x = visible(create("mavit_nano")), image(64, 64)
    tap = model.forward_intermediates(x, [3], intermediates_only=True)[0]
    model.prune_intermediate_layers([3], prune_norm=True)
    assert_close(model.forward_features(x), tap)
    assert model.num_features == tap.shape[1]
