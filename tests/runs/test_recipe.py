import re
import subprocess
import sys

import pytest
from tiny_run import write_recipe

from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe

# another library may name the union of the two first, in the other order, which typing then keeps
PROBE = """
import typing
typing.Optional[typing.Union[float, int]]
import sys
from linvit.runs import load_run, train
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
recipe = Recipe(read_recipe(sys.argv[1]))
given = recipe.trainer(logger=False), recipe.resolved()["trainer"]
print([repr(value) for value in (given[0].limit_train_batches, given[1]["limit_train_batches"])])
"""


@pytest.mark.parametrize("batches", [1, 1.0, 0.5])
def test_a_number_of_batches_stays_whole_and_a_share_a_share(batches, tmp_path):
    path = write_recipe(tmp_path, trainer={"limit_train_batches": batches})
    recipe = Recipe(read_recipe(path))
    for value in (
        recipe.trainer(logger=False).limit_train_batches,
        recipe.resolved()["trainer"]["limit_train_batches"],
    ):
        assert repr(value) == repr(batches)


@pytest.mark.slow
def test_a_batch_is_no_epoch_whatever_was_imported_before(tmp_path):
    path = write_recipe(tmp_path, trainer={"limit_train_batches": 1})
    done = subprocess.run([sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, timeout=120)
    assert "['1', '1']" in done.stdout, done.stderr


def test_the_start_of_a_run_may_name_values_of_its_recipe(tmp_path):
    path = write_recipe(tmp_path, init="runs/first/{model.name}/seed{seed}", model={"name": "ravlt_nano"}, seed=3)
    recipe = Recipe(read_recipe(path))
    assert recipe.values["init"] == recipe.resolved()["init"] == "runs/first/ravlt_nano/seed3"


@pytest.mark.parametrize("key", ["speed", "model", "model.name.first", "trainer.devices.x"])
def test_the_start_of_a_run_names_no_other_keys(key, tmp_path):
    path = write_recipe(tmp_path, init=f"runs/{{{key}}}/last.ckpt")
    said = re.escape(f"`init` is 'runs/{{{key}}}/last.ckpt', but the recipe has no single value for {key}")
    with pytest.raises(ValueError, match=said):
        Recipe(read_recipe(path))
