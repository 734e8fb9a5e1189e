import pytest

from linvit.runs.recipe_values import publishable


def test_paths_are_left_out_at_any_depth():
    values = {
        "seed": 3,
        "folder": "runs/x",
        "init": "/home/ada/runs/vit/best.ckpt",
        "data": {
            "name": "imagefolder",
            "root": "photos",
            "val_root": "val",
            "crop_pct": 0.9,
            "class_names": ["a/b", "c"],
        },
        "model": {"name": "ravlt_nano", "checkpoint_path": r"C:\Users\ada\w.safetensors", "pattern": "LLLL"},
        "distillation": {"teacher": "resnet10t", "checkpoint": "teacher.pth"},
        "trainer": {
            "max_epochs": 2,
            "logger": {"class_path": "WandbLogger", "init_args": {"entity": "ada"}},
            "callbacks": [{"class_path": "Timer", "init_args": {"interval": "step", "file": "~/x"}}, "/home/ada/y"],
        },
    }
    assert publishable(values) == {
        "seed": 3,
        "init": "best.ckpt",
        "data": {"name": "imagefolder", "crop_pct": 0.9, "class_names": ["a/b", "c"]},
        "model": {"name": "ravlt_nano", "checkpoint_path": "w.safetensors", "pattern": "LLLL"},
        "distillation": {"teacher": "resnet10t", "checkpoint": "teacher.pth"},
        "trainer": {"max_epochs": 2, "callbacks": [{"class_path": "Timer", "init_args": {"interval": "step"}}]},
    }


@pytest.mark.parametrize(
    "path",
    ["/a", "~/a", "~ada", r"\\server\a", "C:/a", r"d:\a", "../a", "./a", "$HOME/a", "file:a", "pipe:cat /a", "x=/a"],
)
def test_forms_of_paths(path):
    assert publishable({"any": path, "other": [path, "b"]}) == {"other": ["b"]}


@pytest.mark.parametrize(
    "text", ["hfds/uoft-cs/cifar10", "https://example.org/a.tar", "rand-m9-mstd0.5-inc1", "hf-hub:a/b"]
)
def test_what_is_no_path_stays(text):
    assert publishable({"any": text}) == {"any": text}
