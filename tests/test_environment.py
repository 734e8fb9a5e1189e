import json
import subprocess

import torch

from linvit import environment


def test_description_is_plain_json_and_names_versions_and_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/linvit", "train", "a.yaml"])
    described = json.loads(json.dumps(environment.describe(2, 4)))
    assert described["command"] == ["linvit", "train", "a.yaml"]
    assert described["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert (described["devices_used"], described["processes"]) == (2, 4)
    assert described["devices"]


def test_commit_is_that_of_the_checkout_alone(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    module = tmp_path / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(module))
    assert environment.commit() is None
    git("init", "-q")
    module.touch()
    assert environment.commit() is None, "below a repository, but no part of it"
    git("add", "."), git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    assert environment.commit() == head
    module.write_text("changed")
    assert environment.commit() == f"{head}-dirty"


def test_every_start_adds_an_entry(tmp_path):
    path = tmp_path / "environment.json"
    environment.append(path, {"started": 1})
    environment.append(path, {"started": 2})
    assert json.loads(path.read_text()) == [{"started": 1}, {"started": 2}]
    path.write_text("[{")
    environment.append(path, {"started": 3})
    assert json.loads(path.read_text()) == [{"started": 3}]


def test_the_processor_has_a_name_and_where_it_is_known_a_model(monkeypatch):
    facts = {"model name": "AMD EPYC", "cpu family": "25", "model": "17"}
    monkeypatch.setattr(environment, "processor_facts", lambda: facts)
    assert environment.processor() == "AMD EPYC, family 25.17"
    monkeypatch.setattr(environment, "processor_facts", dict)
    assert environment.processor()
