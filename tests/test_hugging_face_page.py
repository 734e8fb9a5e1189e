"""The code of docs/use/hugging-face.md runs, from top to bottom, without a network; and what the page says is so."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from stand_in_weights import write_stand_ins

import linvit
from linvit import runs

pytest.importorskip("transformers", reason="needs the extra hf")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "use" / "hugging-face.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
HEAVY = "import lightly_train"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the blocks make, except that of lightly-train, in a folder of their own."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        write_stand_ins(folder, patch)
        import transformers.dynamic_module_utils as remote_code

        patch.setattr(remote_code, "HF_MODULES_CACHE", str(folder / "modules"))
        whole = runs.train

        def short(recipe, overrides, **options):
            return whole(recipe, {**overrides, "trainer.limit_train_batches": 2}, **options)

        patch.setattr(runs, "train", short)
        names = {"folder": folder}
        for block in BLOCKS:
            if HEAVY not in block:
                exec(compile(block, "hugging-face.md", "exec"), names)
        yield names


def test_a_folder_of_timm_is_read_by_transformers(page):
    (row,) = linvit.load_run(page["folder"] / "folder").predict([page["image"]], topk=3)
    assert page["logits"].shape == (1, 10)
    assert [answer["label"] for answer in page["answers"]] == row.classes
    assert [answer["score"] for answer in page["answers"]] == pytest.approx(row.probabilities, abs=1e-6)


def test_one_step_of_trainer_changes_the_weights(page):
    assert page["trained"].global_step == 1
    before = timm.create_model("local-dir:" + str(page["folder"] / "folder"), pretrained=True).state_dict()
    after = page["model"].timm_model.state_dict()
    assert before.keys() == after.keys()
    assert sum(not torch.equal(after[key].cpu(), value) for key, value in before.items()) > len(before) / 2


def test_a_pushed_folder_is_read_by_transformers_and_linvit(page):
    x = torch.randn(3, 3, 32, 32)
    assert set(page["pushed"].files) == {path.name for path in page["pushed"].folder.iterdir()}
    with torch.inference_mode():
        expected = page["run"].network(x)
        torch.testing.assert_close(page["digits"].eval()(x).logits, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(page["same"].network(x), expected, rtol=0, atol=1e-6)
    assert page["same"].preprocessing == page["run"].preprocessing
    assert list(page["digits"].config.id2label.values()) == page["run"].class_names == page["same"].class_names


WITHOUT_IMPORT = """
import sys
from transformers import AutoModel, AutoModelForImageClassification, pipeline

try:
    AutoModelForImageClassification.from_pretrained("hub")
except ImportError as error:
    print(str(error))
assert "linvit" not in sys.modules
classify = pipeline("image-classification", "hub", trust_remote_code=True)
AutoModel.from_pretrained("hub", trust_remote_code=True)
classify.model.save_pretrained("again")
"""


@pytest.mark.slow
def test_trust_remote_code_needs_no_import(page, tmp_path):
    """Without it, transformers says what the page explains; a folder that it saves is complete."""
    shutil.copytree(page["pushed"].folder, tmp_path / "hub")
    paths = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT_IMPORT], cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    explained = re.search(r"```text\n(The model architecture '(\w+)'.*?) …", PAGE)
    assert shown.stdout.startswith(explained[1].replace(explained[2], "ravlt_nano"))
    assert "is not supported" not in shown.stderr
    x = torch.randn(1, 3, 32, 32)
    again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()
    torch.testing.assert_close(again(x), page["run"].network(x))
    assert (tmp_path / "again" / "modeling_linvit.py").is_file()


def test_a_segmentor_learns_through_the_backbone(page):
    assert [tuple(each.shape[1:]) for each in page["maps"]] == [(32, 16, 24), (48, 8, 12), (64, 4, 6), (96, 2, 3)]
    assert page["segmented"].logits.shape == (2, 5, 64, 96)
    assert all(weight.grad is not None for weight in page["segmentor"].backbone.parameters())


@pytest.mark.parametrize("name", ["mavit_nano", "care_nano"])
def test_a_detector_learns_through_the_backbone(page, name):
    from transformers import RTDetrConfig, RTDetrForObjectDetection, TimmBackboneConfig

    backbone = TimmBackboneConfig(backbone=name, out_indices=[1, 2, 3])
    channels = timm.create_model(name, features_only=True, out_indices=[1, 2, 3]).feature_info.channels()
    config = RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=channels,
        **dict.fromkeys(("d_model", "encoder_hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
        decoder_in_channels=[32] * 3,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        decoder_layers=1,
        num_queries=10,
        num_denoising=0,
        num_labels=3,
    )
    detector = RTDetrForObjectDetection(config).train()
    boxes = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}
    detected = detector(torch.randn(2, 3, 64, 96), labels=[boxes, boxes])
    detected.loss.backward()
    assert detected.logits.shape == (2, 10, 3)
    assert torch.isfinite(detected.loss)
    assert all(weight.grad is not None for weight in detector.model.backbone.parameters())


TARGETS = {name: json.loads(names) for name, names in re.findall(r"^\| (RAVLT|CARE).*?`(\[.*\])`", PAGE, re.MULTILINE)}


@pytest.mark.parametrize("name", ["ravlt_nano", "mavit_nano", "care_nano"])
def test_lora_learns_and_merges(name):
    from peft import LoraConfig, get_peft_model

    targets = TARGETS["CARE" if name == "care_nano" else "RAVLT"]
    network = timm.create_model(name, num_classes=3, dtype=torch.float64)
    lora = LoraConfig(r=2, target_modules=targets, modules_to_save=["head.fc"])
    adapted = get_peft_model(network, lora, autocast_adapter_dtype=False)
    learned = {key: weight for key, weight in adapted.named_parameters() if weight.requires_grad}
    images, labels = torch.randn(3, 3, 46, 65, dtype=torch.float64), torch.arange(3)
    optimizer = torch.optim.SGD(learned.values(), 0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(adapted(images), labels))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(weight.grad.any() for weight in learned.values())
    adapted.eval()
    with torch.no_grad():
        expected = adapted(images)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(images), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(linvit.fuse(merged)(images), expected, rtol=1e-12, atol=1e-12)
    assert merged.state_dict().keys() == timm.create_model(name, device="meta").state_dict().keys()


@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano"])
def test_all_linear_adapts_only_classifiers(name):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(timm.create_model(name), LoraConfig(r=2, target_modules="all-linear"))
    assert {key.split(".")[-2] for key in adapted.base_model.targeted_module_names} <= {"head", "dist_head"}


def test_the_block_of_lora_runs(page):
    assert type(page["merged"]) is type(timm.create_model("ravlt_nano"))
    images = page["images"]
    torch.testing.assert_close(page["fused"](images), page["merged"](images), rtol=1e-4, atol=1e-5)


def test_a_tower_of_open_clip_has_normalized_features(page):
    assert page["image_features"].shape == (1, 64)
    assert page["text_features"].shape == (2, 64)
    (page["image_features"] @ page["text_features"].T).sum().backward()
    assert all(weight.grad is not None for weight in page["clip"].visual.parameters())


def test_encoders_of_segmentation_models(page):
    import segmentation_models_pytorch as smp

    assert page["masks"].shape == (2, 5, 64, 96)
    for decoder in (smp.DeepLabV3Plus, smp.PAN):
        with pytest.raises(TypeError, match="output_stride"):
            decoder("tu-ravlt_nano", encoder_weights=None)


def test_lightly_train_pretrains_by_name(page, monkeypatch):
    pytest.importorskip("lightly_train", reason="not installed by the extra hf")
    monkeypatch.setenv("LIGHTLY_TRAIN_EVENTS_DISABLED", "1")
    monkeypatch.chdir(page["folder"])
    (block,) = [block for block in BLOCKS if HEAVY in block]
    before = timm.create_model("ravlt_nano", final_width=96).state_dict()
    exec(compile(block, "hugging-face.md", "exec"), page)
    after = page["pretrained"].state_dict()
    assert not torch.equal(after["stem.0.weight"], before["stem.0.weight"])


def test_the_versions_are_those_of_the_tests():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in ("transformers", "huggingface_hub", "peft"):
        assert re.search(rf"\[{name}\]\(.*?\) \| {re.escape(pinned[name])} \|", PAGE)
    assert f"[open_clip](#open_clip) | {pinned['open_clip_torch']} |" in PAGE
    assert f"| {pinned['segmentation_models_pytorch']} |" in PAGE
