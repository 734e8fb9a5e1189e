"""A run as a folder for the Hugging Face hub, and its upload: to a stand-in of the hub on this machine."""

import http.server
import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
import yaml
from safetensors import safe_open
from tiny_run import ONE_STEP, write_recipe
from torch.testing import assert_close

from linvit.runs import load_run
from linvit.runs.training import train_folder
from linvit_cli import main

FILES = {"README.md", "config.json", "metrics.csv", "model.safetensors", "modeling_linvit.py", "recipe.yaml"}


@pytest.fixture(scope="module")
def measured(trained):
    """The run, as if trained with files of its machine, and its measures."""
    run = load_run(trained)
    places = {
        "init": "/home/ada/secret/start.ckpt",
        "model": run.recipe["model"] | {"checkpoint_path": "~/secret/w.pth"},
    }
    trainer = run.recipe["trainer"] | {"default_root_dir": "/home/ada/secret", "callbacks": ["/home/ada/secret"]}
    return replace(run, recipe=run.recipe | places | {"trainer": trainer}), run.evaluate()


@pytest.fixture(scope="module")
def pushed(measured, tmp_path_factory):
    run, measures = measured
    folder = tmp_path_factory.mktemp("pushed")
    return run.push_to_hub("ada/digits", folder=folder, dry_run=True, measures=measures, license="mit", note="Digits.")


def test_the_folder_is_timms_and_has_every_file(pushed, measured):
    run, _ = measured
    assert pushed.url is None
    assert pushed.files == {path.name: path.stat().st_size for path in pushed.folder.iterdir()}
    assert pushed.files.keys() == FILES
    read = timm.create_model(f"local-dir:{pushed.folder}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(read(x), run.network(x), rtol=0, atol=0)
    assert read.pretrained_cfg["label_names"] == run.class_names
    assert read.pretrained_cfg["license"] == "mit"


def test_no_path_of_the_machine_is_in_it(pushed, trained):
    for path in pushed.folder.iterdir():
        content = path.read_bytes()
        for word in (b"secret", b"/home/", str(trained.parent).encode(), str(pushed.folder).encode()):
            assert word not in content, path.name
    recipe = yaml.safe_load((pushed.folder / "recipe.yaml").read_text())
    assert (recipe["init"], recipe["model"]["checkpoint_path"]) == ("start.ckpt", "w.pth")


def test_the_card_is_that_of_convert_with_the_hubs_name(pushed, measured):
    _, measures = measured
    card = huggingface_hub.ModelCard((pushed.folder / "README.md").read_text())
    expected = {"license": "mit", "library_name": "timm", "pipeline_tag": "image-classification"}
    assert expected.items() <= card.data.to_dict().items()
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_value) == ("digits, held out", round(100 * measures["top1"], 2))
    for text in ("# ada/digits", "hf-hub:ada/digits", "trust_remote_code=True", "- Digits.", "396,370"):
        assert text in card.text
    assert "grey" not in card.text
    with safe_open(pushed.folder / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["measures"]) == dict(measures)


def test_a_network_of_grey_images_says_so(tmp_path):
    run = train_folder(write_recipe(tmp_path, data={"channels": 1}, trainer=ONE_STEP))
    pushed = load_run(run).push_to_hub("ada/digits", dry_run=True)
    assert pushed.folder == run / "hub"
    assert 'image.convert("L")' in (pushed.folder / "README.md").read_text()
    assert load_run(pushed.folder).preprocessing == load_run(run).preprocessing


def test_the_folder_is_a_run(pushed, measured, tmp_path, capsys):
    run, measures = measured
    read = load_run(pushed.folder)
    assert (read.preprocessing, read.class_names) == (run.preprocessing, run.class_names)
    assert read.evaluate("digits")["top1"] == measures["top1"]
    with pytest.raises(ValueError, match="comes without a recipe"):
        read.push_to_hub("ada/digits", dry_run=True)


def test_python_files_of_a_folder_are_not_run(pushed, tmp_path):
    folder = shutil.copytree(pushed.folder, tmp_path / "folder")
    for name in ("modeling_linvit.py", "__init__.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'RAN')!r}, 'w').close()")
    assert len(load_run(folder).class_names) == 10
    assert not (tmp_path / "RAN").exists()


GREY = {"input_size": [1, 32, 32], "mean": [0.5], "std": [0.5]}


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "ravlt_nanoo"},
        {"num_classes": 3},
        {"model_args": {"widths": [10**6] * 4}},
        {"model_args": {"pretrained": True}},
        {"label_names": [1] * 10},
        {"pretrained_cfg": GREY | {"interpolation": "evil"}},
        {"pretrained_cfg": GREY | {"std": 0.5}},
        {"pretrained_cfg": GREY | {"input_size": [1, 32, 32.5]}},
        '{"architecture": 3}',
        "[" * 10_000,
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_broken_configuration_is_one_sentence(pushed, tmp_path, change):
    config = json.loads((pushed.folder / "config.json").read_text())
    shutil.copy(pushed.folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(change if isinstance(change, str) else json.dumps(config | change))
    with pytest.raises(ValueError, match=rf"\A[^\n]*{re.escape(str(tmp_path))}/[^\n]+\Z"):
        load_run(tmp_path)


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does; `account`, `repositories` (name: private) and `writable` are set by each test."""

    account, repositories, writable = "ada", {}, True

    def do_GET(self):
        name = self.path.removeprefix("/api/models/")
        if self.path.endswith("/whoami-v2"):
            self.answer(200 if self.account else 401, {"name": self.account, "orgs": [{"name": "lovelace"}]})
        elif name in self.repositories:
            self.answer(200, {"id": name, "private": self.repositories[name], "siblings": [], "tags": []})
        else:
            self.answer(404, {}, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self):
        self.answer(200 if self.writable else 403, {"url": "https://huggingface.co/ada/digits"})

    def answer(self, status, content, headers=()):
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": len(body), "Content-Type": "application/json", **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A class of answers of its own, and a list that uploads are added to."""

    class Answers(Hub):
        repositories: dict = {}  # noqa: RUF012
        uploads: list = []  # noqa: RUF012

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    upload = lambda self, **options: Answers.uploads.append(options)  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    yield Answers
    server.shutdown()
    server.server_close()


def test_these_files_and_no_others_are_uploaded(hub, measured, tmp_path):
    run, measures = measured
    (tmp_path / "diary.txt").write_text("private")
    pushed = run.push_to_hub("lovelace/digits", folder=tmp_path, measures=measures)
    (upload,) = hub.uploads
    assert set(upload["allow_patterns"]) == FILES
    assert (upload["repo_id"], upload["folder_path"]) == ("lovelace/digits", tmp_path)
    assert pushed.url.endswith("/lovelace/digits")


@pytest.mark.parametrize(
    ("name", "answers", "options", "sentence"),
    [
        ("bob/digits", {}, {}, r"would belong to bob, but you are logged in as ada: write ada/…"),
        ("ada/digits", {"account": None}, {}, r"does not accept your token: create a token"),
        ("ada/digits", {"writable": False}, {}, r"may not write to ada/digits: .* The files are in "),
        ("ada/digits", {"repositories": {"ada/digits": False}}, {}, r"exists and is public: set `public=True`"),
        ("a/b/c", {}, {"dry_run": True}, r"`repository` is 'a/b/c' .*expected user/name"),
        (3, {}, {}, r"`repository` is 3"),
    ],
    ids=str,
)
def test_refusals(hub, measured, tmp_path, name, answers, options, sentence):
    run, measures = measured
    for key, value in answers.items():
        setattr(hub, key, value)
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        run.push_to_hub(name, folder=tmp_path, measures=measures, **options)
    assert "\n" not in str(caught.value)
    assert hub.uploads == []


def test_without_a_token(hub, measured, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="You are not logged in to the Hugging Face hub: create a token"):
        measured[0].push_to_hub("ada/digits", folder=tmp_path)


def test_without_a_network(hub, measured, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ConnectionError, match=r"cannot be reached \(.+\): connect .* `dry_run=True`"):
            measured[0].push_to_hub("ada/digits", folder=tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE forbids every connection"):
        measured[0].push_to_hub("ada/digits", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Terminal:
    def isatty(self):
        return True


@pytest.mark.parametrize(("typed", "uploads"), [("y", 1), ("", 0), ("no", 0)])
def test_the_command_asks(hub, trained, tmp_path, monkeypatch, capsys, typed, uploads):
    asked = []
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or typed)
    assert main(["push", str(trained), "ada/digits", "--folder", str(tmp_path), "--note", "Short."]) == 0
    assert asked == ["Upload these files to ada/digits (private)? [y/N] "]
    assert len(hub.uploads) == uploads
    shown = capsys.readouterr().out
    assert ("Nothing was uploaded." in shown) == (uploads == 0)
    assert all(name in shown for name in FILES)
    assert "- Short." in Path(tmp_path, "README.md").read_text()


def test_the_command_without_a_terminal(hub, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    command = ["push", str(trained), "ada/digits", "--folder", str(tmp_path)]
    assert main(command) == 2
    assert "Nothing is uploaded unasked" in capsys.readouterr().err
    hub.account = None
    assert main([*command, "--dry-run", "--public"]) == 0
    assert "these files would go to ada/digits (public)" in capsys.readouterr().out
    assert hub.uploads == []
    hub.account = "ada"
    assert main([*command, "--yes"]) == 0
    assert len(hub.uploads) == 1
