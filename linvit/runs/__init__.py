"""Where task, network and data meet: train, load, evaluate, predict, generate, analyze, report."""

from linvit.bundled import recipes as recipes
from linvit.runs.data_check import check_data as check_data
from linvit.runs.exporting import export as export
from linvit.runs.loading import load_run as load_run
from linvit.runs.own_images import new_recipe as new_recipe
from linvit.runs.run import Run as Run
from linvit.runs.tasks import AlignmentRun as AlignmentRun
from linvit.runs.tasks import ClassificationRun as ClassificationRun
from linvit.runs.tasks import DetectionRun as DetectionRun
from linvit.runs.tasks import DiffusionRun as DiffusionRun
from linvit.runs.tasks import LanguageRun as LanguageRun
from linvit.runs.tasks import MultiLabelRun as MultiLabelRun
from linvit.runs.tasks import RecallRun as RecallRun
from linvit.runs.tasks import SegmentationRun as SegmentationRun
from linvit.runs.tasks import SpeechRun as SpeechRun
from linvit.runs.tasks import TransferRun as TransferRun
from linvit.runs.training import train as train
from linvit.runs.training import train_in_turn as train_in_turn
