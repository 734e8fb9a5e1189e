"""Model output → loss and metrics: each task is a LightningModule."""

from linvit.tasks.alignment import Alignment as Alignment
from linvit.tasks.classification import Classification as Classification
from linvit.tasks.detection import Detection as Detection
from linvit.tasks.diffusion import Diffusion as Diffusion
from linvit.tasks.language import Language as Language
from linvit.tasks.language import Recall as Recall
from linvit.tasks.segmentation import Segmentation as Segmentation
from linvit.tasks.speech import Speech as Speech
from linvit.tasks.students import Transfer as Transfer
from linvit.tasks.task import Task as Task
