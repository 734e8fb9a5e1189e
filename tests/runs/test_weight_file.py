import ast
import itertools
import json

import pytest
import timm
import torch
import yaml
from markdown_it import MarkdownIt
from PIL import Image
from safetensors import safe_open
from stand_in_weights import write_black_cifar10, write_stand_ins
from torch.testing import assert_close

from linvit.environment import commit
from linvit.models.by_name import bundled_weights
from linvit.runs import load_run
from linvit.runs.weight_file import creation
from linvit.studies.demo import on_photographs
from linvit_cli import main


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "digits.safetensors"
    arguments = ["convert", str(trained), str(path), "--half", "--license", "mit", "--note", "Digits: not letters."]
    assert main(arguments) == 0
    return path


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    return write_stand_ins(tmp_path, monkeypatch)


def test_the_file_has_the_rounded_weights_of_the_run(trained, written):
    run = load_run(trained)
    read = timm.create_model("ravlt_nano", num_classes=10, checkpoint_path=str(written)).state_dict()
    for key, value in run.network.state_dict().items():
        assert_close(read[key], value, rtol=2**-11, atol=2**-25)
    assert written.stat().st_size < 2.1 * sum(parameter.numel() for parameter in run.network.parameters()) + 2**15


def test_its_header_and_card_say_where_it_comes_from(trained, written):
    with safe_open(written, "pt") as file:
        about = file.metadata()
    read = load_run(model="ravlt_nano", checkpoint=written)
    read.prepare(**json.loads(about["preprocessing"]))
    assert json.loads(about["measures"]) == pytest.approx(dict(read.evaluate(data="digits")))
    assert (json.loads(about["seed"]), about["license"], about["commit"]) == (3, "mit", commit())
    assert json.loads(about["model"]) == {"name": "ravlt_nano", "drop_path_rate": 0.2}
    assert json.loads(about["class_names"]) == [str(digit) for digit in range(10)]
    assert set(json.loads(about["recipe"])) == set(yaml.safe_load((trained / "recipe.yaml").read_text())) - {"folder"}
    card = written.with_suffix(".md").read_text()
    _, matter, text = card.split("---\n", 2)
    assert yaml.safe_load(matter)["license"] == "mit"
    assert f"| top-1, held out | {100 * json.loads(about['measures'])['top1']:.2f} % |" in text
    for words in (
        "396,370",
        "float16",
        "| images to train on | 1,437 |",
        "| images, held out | 360 |",
        "- Digits: not letters.",
        "10 classes",
    ):
        assert words in text
    code = text.split("```python\n")[1].split("```")[0].replace('"digits.safetensors"', repr(str(written)))
    held = {}
    exec(code, held)
    assert held["model"].num_classes == 10


def test_a_card_shows_text_of_users_as_it_is(trained, tmp_path):
    run = load_run(trained)
    run.class_names[0] = "x\n---\n<script>"
    run.recipe["optimizer"]["note"] = "\n```\n# heading"
    path = tmp_path / "digits.safetensors"
    note = "a\u202e [l](javascript:x)\n# heading"
    run.save_weights(path, note=note, measures=run.evaluate())
    card = path.with_suffix(".md").read_text().split("---\n", 2)[2]
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(card)
    headings = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    assert headings == ["digits", "Use", "Limits", "Recipe"]
    assert not any(token.type in ("hr", "html_block") for token in tokens)
    assert "| classes | x\\\\n---\\\\n\\<script\\>, 1," in card
    assert "- a\\\\u202e \\[l\\](javascript:x)\\\\n# heading\n" in card


def test_the_measures_are_those_of_the_rounded_weights(trained, tmp_path, monkeypatch):
    """A rounding so coarse that it changes the answers."""
    run = load_run(trained)
    before = {key: value.clone() for key, value in run.network.state_dict().items()}
    monkeypatch.setattr(
        "linvit.runs.weight_file.rounded", lambda weights: {key: torch.zeros_like(v) for key, v in weights.items()}
    )
    path = run.save_weights(tmp_path / "zero.safetensors", half=True)
    with safe_open(path, "pt") as file:
        measures = json.loads(file.metadata()["measures"])
    assert measures["loss"] == pytest.approx(torch.tensor(10.0).log().item())
    assert all(torch.equal(value, before[key]) for key, value in run.network.state_dict().items())


def test_what_cannot_be_written_is_refused(trained, tmp_path):
    run = load_run(trained)
    with pytest.raises(ValueError, match=r"ending in \.safetensors: rename it"):
        run.save_weights(tmp_path / "weights.pth")
    with pytest.raises(FileNotFoundError, match="create it first"):
        run.save_weights(tmp_path / "missing" / "weights.safetensors")
    with pytest.raises(ValueError, match="`held_out` would describe other data than those of the run"):
        run.save_weights(tmp_path / "weights.safetensors", held_out=0.5)
    with pytest.raises(ValueError, match="ravlt_nano comes without a recipe, expected a run of classification"):
        load_run(model="ravlt_nano", untrained=True).save_weights(tmp_path / "weights.safetensors")
    with torch.no_grad():
        run.network.get_parameter("stem.0.weight").mul_(1e9)
    with pytest.raises(ValueError, match=r"stem\.0\.weight are not finite in float16: leave `half` out"):
        run.save_weights(tmp_path / "weights.safetensors", half=True)
    assert not list(tmp_path.iterdir())
    assert main(["convert", str(trained), str(tmp_path / "w.safetensors"), "--model", "ravlt_nano", "--note", "x"]) == 2


def test_networks_with_weights_need_no_checkpoint(stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = load_run(model="mavit_nano.cifar10")
    assert (run.name, run.class_names[-1], run.preprocessing.crop_pct) == ("mavit_nano.cifar10", "truck", 1.0)
    assert not run.folder.is_absolute()
    expected = timm.create_model("mavit_nano.cifar10", pretrained=True).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in run.network.state_dict().items())
    Image.linear_gradient("L").save("photo.png")
    assert main(["predict", "photo.png", "--model", "mavit_nano.cifar10", "--output", "classes.json"]) == 0
    (answer,) = json.loads((tmp_path / "classes.json").read_text())
    logits = run.network(run.preprocessing.transform()(Image.open("photo.png").convert("RGB"))[None])[0]
    assert answer["predictions"][0]["class"] == run.class_names[logits.argmax()]
    assert main(["analyze", "rank", "--model", "mavit_nano.cifar10", "--count", "2", "--images", "photo.png"]) == 0
    page = (tmp_path / "runs" / "mavit_nano.cifar10" / "analysis" / "report.html").read_text()
    assert "never trained" not in page
    capsys.readouterr()
    write_black_cifar10(tmp_path)
    assert main(["eval", "--model", "mavit_nano.cifar10", "data=cifar", "data.root=.", "--json", "--report"]) == 0
    assert (tmp_path / "runs" / "mavit_nano.cifar10" / "report.html").is_file()
    black = run.preprocessing.transform()(Image.new("RGB", (32, 32)))
    is_airplane = run.network(black[None]).argmax().item() == 0
    assert json.loads(capsys.readouterr().out)["raw"]["top1"] == is_airplane
    assert main(["predict", "photo.png", "--model", "mavit_nano"]) == 2
    assert "only care_nano.cifar10, mavit_nano.cifar10, ravlt_nano.cifar10 come with weights" in capsys.readouterr().err
    bundled_weights("mavit_nano.cifar10").unlink()
    assert main(["predict", "photo.png", "--model", "mavit_nano.cifar10"]) == 2
    assert "mavit_nano.cifar10.safetensors are missing or damaged" in capsys.readouterr().err


def test_the_demo_shows_networks_with_weights_on_photographs(stand_ins, tmp_path):
    for name in ("care_nano.cifar10", "ravlt_nano.cifar10"):
        bundled_weights(name).unlink()
    said = []
    parts = "".join(on_photographs(tmp_path, said.append))
    assert said == ["Showing photographs to mavit_nano.cifar10"]
    for words in ("china.jpg by danielbuechele", "CC BY 2.0", "airplane", "photographs/mavit_nano.cifar10/report.html"):
        assert words in parts
    bundled_weights("mavit_nano.cifar10").unlink()
    assert on_photographs(tmp_path, said.append) == [f"<p>{said[-1]}</p>"]
    assert said[-1].startswith("No trained weights come with this copy of linvit")


@pytest.mark.parametrize("count", [1, 8, 12])
def test_code_of_a_card_is_no_wider_than_a_page(count):
    text = creation("ravlt_nano", **{f"argument_{i}": i for i in range(count)})
    code = text.removeprefix("```python\n").removesuffix("```")
    assert max(map(len, code.splitlines())) <= 120
    call = ast.parse(code).body[-1].value.func.value
    assert [word.arg for word in call.keywords] == [f"argument_{i}" for i in range(count)]
