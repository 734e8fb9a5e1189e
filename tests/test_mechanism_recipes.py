"""The recipes of DeiT-T, Swin-T and Swin-S with other attention: the trainings of DeiT and Swin, and a step of each."""

from pathlib import Path

import pytest
import torch
from imagenet_folder import write_imagenet

from evidence.published import ROWS
from linvit.bundled import header
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.tasks.optimization import Optimizer, Schedule

MECHANISMS = Path(__file__).parents[1] / "recipes" / "mechanisms"
RECIPES = sorted(path for path in MECHANISMS.rglob("*.yaml") if path.name != "base.yaml")
HOSTS = ("deit_tiny", "swin_tiny", "swin_small")
TABLES = ("RALA, Table 8", "RALA, Table 10", "MALA, Table 1", "MALA, Table 9")
BATCH, STEPS = 1024, 10  # images of a step in the published trainings, steps of an epoch here
SMALL = ["data.size=32", "data.batch_size=2", "data.num_workers=0", "trainer.precision=32-true"]
SMALLER = {
    "deit_tiny": ["model.depth=1"],
    "swin_tiny": ["model.embed_dim=24", "model.depths=[2, 2, 1, 1]"],
    "swin_small": ["model.embed_dim=24", "model.depths=[1, 1, 2, 1]"],
}
named = {"ids": lambda path: f"{path.parent.name}_{path.stem}"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("data"), train=1, val=(1, 1, 1))


def values_of(host, name="softmax"):
    return Recipe(read_recipe(MECHANISMS / host / f"{name}.yaml")).resolved()


def test_every_row_of_the_tables_has_a_recipe():
    cited = [part.partition(" (")[2][:-1] for path in RECIPES for part in header(path)["published"].split("; ")]
    assert sorted(cited) == sorted(name for name, row in ROWS.items() if row.table in TABLES)


@pytest.mark.parametrize("path", RECIPES, **named)
def test_recipe_changes_the_attention_alone(path):
    values, plain = Recipe(read_recipe(path)).resolved(), values_of(path.parent.name)
    name = path.stem.removesuffix("_learned")
    learned = {"attention": {"weighting": "learned"}} if name != path.stem else {}
    assert values.pop("model") == {**plain.pop("model"), "name": f"{path.parent.name}_{name}", **learned}
    assert values.pop("folder") == f"runs/{path.parent.name}_{path.stem}"
    plain.pop("folder")
    assert values == plain


@pytest.mark.parametrize("path", RECIPES, **named)
def test_a_step_reaches_every_parameter(path, tiny):
    small = [*SMALL, *SMALLER[path.parent.name], "model.img_size=32", f"data.root={tiny}"]
    task, source = Recipe(read_recipe(path, small)).build()
    task.log = lambda *args, **kwargs: None
    parameters = list(task.network.train().parameters())
    optimizer = task.optimizer.build(task.network, 2)
    before = [parameter.detach().clone() for parameter in parameters]
    task.training_step(next(iter(source.train_dataloader())), 0).backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in parameters)
    assert sum(not torch.equal(old, new) for old, new in zip(before, parameters, strict=True)) > len(parameters) / 2


@pytest.mark.parametrize("host", HOSTS)
def test_learning_rate_weight_decay_and_regularization(host):
    """DeiT's Table 9 and main.py; Swin's Section 4.1 and config.py."""
    values, swin = values_of(host), host.startswith("swin")
    network = torch.nn.Linear(4, 4)
    optimizer = Optimizer(**values["optimizer"]).build(network, BATCH)
    assert type(optimizer) is torch.optim.AdamW
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.05]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    schedule = Schedule(**values["schedule"]).build(optimizer, 300 * STEPS, STEPS)
    rates = []
    for step in range(300 * STEPS):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    warmup, first, last = (20, 5e-7, 5e-6) if swin else (5, 1e-6, 1e-5)
    assert rates[0] == first
    assert abs(rates.index(max(rates)) - warmup * STEPS) <= 1
    assert rates[-1] == pytest.approx(last, rel=0.05)
    task, data, trainer = values["task"], values["data"], values["trainer"]
    assert (trainer["max_epochs"], trainer["gradient_clip_val"]) == (300, 5.0 if swin else None)
    assert (task["label_smoothing"], task["mixup"], task["cutmix"], task["mix_probability"]) == (0.1, 0.8, 1.0, 1.0)
    assert (data["auto_augment"], data["random_erasing"], data["color_jitter"]) == ("rand-m9-mstd0.5-inc1", 0.25, 0.4)
    assert (data["repeats"], task["ema_decay"]) == ((1, None) if swin else (3, 0.99996))
    assert data["size"] / data["crop_pct"] == 256
    assert values["model"]["drop_path_rate"] == {"deit_tiny": 0.1, "swin_tiny": 0.2, "swin_small": 0.3}[host]
