import json
import os
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file

from linvit.data.generation import Latents, _squared, decoded
from linvit.runs.training import train
from linvit_cli import main


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vae")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, **blocks).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def latents(vae, tmp_path_factory):
    images, folder = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("latents")
    random = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 2)):
        for name in ("cat", "dog"):
            (images / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (40, 33 + number, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(images / part / name / f"{number}.png")
    assert main(["data", "make-latents", str(images), str(folder), "--vae", vae, "--size", "16"]) == 0
    return images, folder


def test_latents_are_those_of_the_autoencoder(latents, vae):
    images, folder = latents
    source = Latents(str(folder), batch_size=4)
    assert (source.num_classes, source.channels, source.preprocessing.size) == (2, 4, (8, 8))
    held_out = source.val_set()
    assert len(held_out) == 4
    latent, label = held_out[3]
    assert label == 1
    with Image.open(images / "val" / "dog" / "1.png") as image:
        pixels = _squared(image, 16)
    autoencoder = AutoencoderKL.from_pretrained(vae)
    with torch.no_grad():
        mean = autoencoder.encode(pixels[None]).latent_dist.mean[0]
    torch.testing.assert_close(latent, mean * autoencoder.config.scaling_factor, rtol=2e-3, atol=1e-3)
    values = source.preprocessing.values(latent[None])
    with torch.no_grad():
        expected = (autoencoder.decode(mean[None]).sample + 1).clamp(0, 2) / 2
    torch.testing.assert_close(decoded(values, vae), expected, rtol=1e-2, atol=1e-2)


def test_latents_are_centred_and_the_autoencoder_is_found_from_elsewhere(latents, vae, tmp_path, monkeypatch):
    moved = AutoencoderKL.from_pretrained(vae)
    moved.register_to_config(shift_factor=0.25)
    moved.save_pretrained(tmp_path / "vae")
    monkeypatch.chdir(tmp_path)
    assert main(["data", "make-latents", str(latents[0]), "out", "--vae", "vae", "--size", "16"]) == 0
    source, plain = Latents("out"), Latents(str(latents[1]))
    assert source.preprocessing.decoder == str(tmp_path / "vae")
    latent, before = source.val_set()[3][0], plain.val_set()[3][0]
    torch.testing.assert_close(latent, before - 0.25 * plain.scale, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(source.preprocessing.values(latent[None]), plain.preprocessing.values(before[None]))
    about = json.loads((tmp_path / "out" / "latents.json").read_text())
    del about["shift"]
    (tmp_path / "out" / "latents.json").write_text(json.dumps(about))
    torch.testing.assert_close(Latents("out").val_set()[3][0], before)


def test_training_draws_from_image_and_mirror_image(latents):
    training = Latents(str(latents[1])).train_set()
    torch.manual_seed(0)
    drawn = torch.stack([training[0][0] for _ in range(40)])
    assert drawn.std(0).min() > 0
    torch.manual_seed(0)
    assert torch.equal(training[0][0], drawn[0])


def test_a_stopped_command_keeps_what_is_complete(latents, vae):
    images, folder = latents
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert main(["data", "make-latents", str(images), str(folder), "--vae", vae, "--size", "16"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


def test_a_network_trains_on_them_and_draws_through_the_decoder(latents, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "model: {name: dit_nano_patch2, channels: 4, mechanism: rala, width: 16, depth: 1,"
        " heads: 2, learn_sigma: true}\n"
        "task: {name: diffusion, generates: false, clips: false}\n"
        f"data: {{name: latents, root: {latents[1]}, batch_size: 4}}\n"
        f"trainer: {{max_epochs: 1, accelerator: cpu}}\nfolder: {tmp_path / 'run'}\n"
    )
    run = train(recipe)
    assert len(run.generate(classes=["cat"], count=2, steps=3, output=tmp_path / "cats.npz")) == 2
    assert np.load(tmp_path / "cats.npz")["arr_0"].shape == (2, 16, 16, 3)


def test_what_is_missing_is_one_sentence(tmp_path, latents, capsys):
    with pytest.raises(ValueError, match=r"latents\.json is missing or damaged: set `root`"):
        Latents(str(tmp_path))
    asked = ["data", "make-latents", str(latents[0]), str(tmp_path), "--vae", str(tmp_path / "none")]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "cannot be read" in said
    assert len(said.splitlines()) == 1


def test_latents_of_another_size_or_other_images_are_not_mixed(latents, vae, tmp_path, capsys):
    images, folder = latents
    asked = ["data", "make-latents", str(images), str(folder), "--vae", vae, "--size"]
    for size, message in (
        ("15", "needs a multiple of 2"),
        ("0", "--size is 0 px"),
        ("32", "from other images, another"),
    ):
        assert main([*asked, size]) == 2
        assert message in capsys.readouterr().err
    shutil.copytree(images, tmp_path / "fewer")
    (tmp_path / "fewer" / "train" / "cat" / "0.png").unlink()
    assert main(["data", "make-latents", str(tmp_path / "fewer"), str(folder), "--vae", vae, "--size", "16"]) == 2
    assert "from other images, another" in capsys.readouterr().err


def test_damaged_files_are_named(latents, tmp_path):
    folder = shutil.copytree(latents[1], tmp_path / "damaged")
    shard = next((folder / "train").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"safetensors is damaged: delete it and make"):
        Latents(str(folder)).train_set()
    for moments, labels in (((2, 2, 8, 4, 4), (2,)), (None, (2,))):
        tensors = {"labels": torch.zeros(labels, dtype=torch.int64)}
        tensors |= {"moments": torch.zeros(moments, dtype=torch.float16)} if moments else {}
        save_file(tensors, shard)
        with pytest.raises(ValueError, match=r"safetensors is damaged: delete it and make"):
            Latents(str(folder)).train_set()
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ValueError, match=r"safetensors is damaged: delete it and make"):
        Latents(str(folder)).train_set()
    about = json.loads((folder / "latents.json").read_text())
    (folder / "latents.json").write_text(json.dumps(about | {"scale": 0}))
    with pytest.raises(ValueError, match=r"latents\.json is missing or damaged"):
        Latents(str(folder))
