import json
import subprocess
import sys

import pytest
import timm
import torch
import yaml
from PIL import Image
from tiny_run import write_recipe

from linvit.data.images import Digits
from linvit.data.images.small import DIGITS_MEAN as MEAN
from linvit.data.images.small import DIGITS_STD as STD
from linvit.files import read_checkpoint
from linvit.models.by_name import bundled_names
from linvit.models.swap import NAMES as SWAPPED_NAMES
from linvit_cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    assert main(["train", str(write_recipe(folder)), "trainer.max_epochs=1", "--trainer.limit_val_batches", "1"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    images = Digits().val_set().images[:8, 0] * STD + MEAN
    for number, image in enumerate(images):
        Image.fromarray((image * 255).round().clamp(0, 255).byte().numpy()).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of an untrained ravlt_nano of ten classes."""
    path = tmp_path_factory.mktemp("weights") / "nano.pth"
    torch.save({"model": timm.create_model("ravlt_nano", num_classes=10).state_dict()}, path)
    return path


def test_train_takes_overrides_in_both_spellings(run):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe["trainer"]["max_epochs"] == 1
    assert recipe["trainer"]["limit_val_batches"] == 1


def test_print_config_shows_every_value_and_trains_nothing(tmp_path, capsys):
    assert main(["train", str(write_recipe(tmp_path)), "--print_config", "data.size=64"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["data"].items() >= {"name": "digits", "size": 64, "max_shift": 2, "held_out": 0.2}.items()
    assert values["trainer"]["gradient_clip_val"] is None
    assert not (tmp_path / "run").exists()


def test_eval_counts_every_image_once_for_both_networks(run, capsys):
    assert main(["eval", str(run), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert list(measured) == ["raw", "ema"]
    about = read_checkpoint(run / "checkpoints" / "best.ckpt")
    network = timm.create_model("ravlt_nano", num_classes=10)
    for kind, prefix in (("raw", "network."), ("ema", "ema.module.")):
        held = {key.removeprefix(prefix): value for key, value in about["state_dict"].items() if key.startswith(prefix)}
        network.load_state_dict(held)
        val = Digits().val_set()
        with torch.inference_mode():
            ranks = network.eval()(val.images).topk(5).indices == val.targets[:, None]
        assert measured[kind]["images"] == 360
        assert measured[kind]["top1"] == pytest.approx(ranks[:, 0].float().mean().item(), abs=1e-6)
        assert measured[kind]["top5"] == pytest.approx(ranks.any(1).float().mean().item(), abs=1e-6)


def test_eval_prints_a_table_for_a_checkpoint_too(run, capsys):
    assert main(["eval", str(run / "checkpoints" / "last.ckpt"), "data=digits"]) == 0
    assert {"top-1", "360"} <= set(capsys.readouterr().out.split())


def test_eval_reads_a_folder_in_the_order_of_the_trained_classes(run, pictures, tmp_path, capsys):
    targets = Digits().val_set().targets[:8].tolist()
    for number, target in enumerate(targets):
        (tmp_path / str(target)).mkdir(exist_ok=True)
        (tmp_path / str(target) / f"{number}.png").write_bytes((pictures / f"{number}.png").read_bytes())
    assert main(["eval", str(run), f"data.root={tmp_path}", "data.num_workers=0", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["raw"]
    assert main(["predict", str(run), str(pictures), "--weights", "raw", "--output", str(tmp_path / "p.json")]) == 0
    named = [row["predictions"][0]["class"] for row in json.loads((tmp_path / "p.json").read_text())]
    right = sum(name == str(target) for name, target in zip(named, targets, strict=True))
    assert (measured["images"], measured["top1"]) == (8, pytest.approx(right / 8))


def test_predict_from_files_is_what_the_network_says_of_the_data(run, pictures, tmp_path):
    target = tmp_path / "table.json"
    assert main(["predict", str(run), str(pictures), "--topk", "10", "--output", str(target)]) == 0
    rows = json.loads(target.read_text())
    held = read_checkpoint(run / "checkpoints" / "best.ckpt")["state_dict"]
    network = timm.create_model("ravlt_nano", num_classes=10).eval()
    prefix = "ema.module."
    network.load_state_dict({key[len(prefix) :]: value for key, value in held.items() if key.startswith(prefix)})
    with torch.inference_mode():
        expected = network(Digits().val_set().images[:8]).softmax(-1)
    for row, probabilities in zip(rows, expected, strict=True):
        found = {part["class"]: part["probability"] for part in row["predictions"]}
        values = torch.tensor([found[str(digit)] for digit in range(10)])
        torch.testing.assert_close(values, probabilities, rtol=0, atol=5e-3)  # pixels were rounded to 8 bits
        assert [part["probability"] for part in row["predictions"]] == sorted(found.values(), reverse=True)


def test_predict_names_corrupt_files_and_predicts_the_others(run, pictures, tmp_path, capsys):
    Image.open(pictures / "0.png").convert("RGBA").resize((300, 200)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes((pictures / "0.png").read_bytes()[:60])
    assert main(["predict", str(run), str(tmp_path), "--output", str(tmp_path / "table.csv")]) == 1
    shown = capsys.readouterr()
    assert "1 prediction is in " in shown.out
    assert "bad.png is not a readable image" in shown.err
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 2
    assert main(["predict", str(run), str(tmp_path / "good.png")]) == 0
    assert str(tmp_path / "good.png") in capsys.readouterr().out


def test_convert_writes_what_timm_reads(tmp_path, capsys):
    wide = timm.create_model("ravlt_nano")
    torch.save(wide.state_dict(), tmp_path / "wide.pth")
    target = tmp_path / "wide.safetensors"
    assert main(["convert", str(tmp_path / "wide.pth"), str(target), "--model", "ravlt_nano"]) == 0
    read = timm.create_model("ravlt_nano", checkpoint_path=str(target))
    assert all(value.equal(wide.state_dict()[key]) for key, value in read.state_dict().items())
    assert "checkpoint_path" in capsys.readouterr().out


def test_eval_and_predict_take_a_model_and_a_file_of_weights(weights, pictures, tmp_path, capsys):
    where = ["--model", "ravlt_nano", "--checkpoint", str(weights)]
    assert main(["eval", *where, "data=digits", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert (list(measured), measured["raw"]["images"]) == (["raw"], 360)
    assert main(["predict", *where, str(pictures), "--output", str(tmp_path / "table.json")]) == 0
    assert len(json.loads((tmp_path / "table.json").read_text())) == 8


def test_models_as_json_has_the_promised_keys_first(capsys):
    assert main(["models", "--family", "care", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["care_nano", "care_s0", "care_s1", "care_s2"]
    assert list(rows[0])[:5] == ["name", "parameters", "macs", "macs_attention", "pattern"]
    s2 = rows[3]
    assert (s2["parameters"], s2["published_top1"], s2["weights"]) == (19_481_288, 82.1, None)
    assert main(["models", "--family", "care"]) == 0
    shown = capsys.readouterr().out
    assert "19.48 M" in shown
    assert "1.918 G" in shown


@pytest.mark.slow
def test_models_lists_every_registered_name(capsys):
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    prefixes = "ravlt_", "mavit_", "care_", "hvittt_", "vit_ttt_", "nalaformer_"
    families = {name for name in timm.list_models() if name.startswith(prefixes)}
    assert set(rows) == families | set(SWAPPED_NAMES)
    assert rows["ravlt_small"]["published_top1"] == 84.4
    assert rows["ravlt_small"]["weights"] == "in1k"
    assert rows["ravlt_nano"]["weights"] == ("cifar10" if "ravlt_nano.cifar10" in bundled_names() else None)
    assert rows["ravlt_small_linear"]["published_top1"] is None
    assert rows["ravlt_small_linear"]["weights"] is None
    swapped = rows["swin_tiny_inline"]
    assert (swapped["pattern"], swapped["published_parameters"], swapped["published_macs"]) == ("LLLS", "30", "4.5")


def test_a_missing_extra_is_named():
    code = (
        "import sys; sys.modules['lightning'] = None; from linvit_cli import main; sys.exit(main(['eval', 'nowhere']))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 2
    assert said.stderr.endswith(
        "This command needs the package lightning: install it with `pip install 'linvit[train]'`, or in a clone or an"
        " unpacked archive with `pip install '.[train]'`.\n"
    )
