"""Where task, network and data meet: train, load, evaluate, predict, generate, analyze, report."""

from linvit.bundled import recipes as recipes
from linvit.runs.data_check import check_data as check_data
from linvit.runs.exporting import export as export
from linvit.runs.loading import load_run as load_run
from linvit.runs.own_images import new_recipe as new_recipe
from linvit.runs.pushing import push as push
from linvit.runs.run import Run as Run
from linvit.runs.training import train as train
from linvit.runs.training import train_in_turn as train_in_turn
