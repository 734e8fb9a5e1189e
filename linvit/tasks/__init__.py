"""Model output → loss and metrics: each task is a LightningModule, listed here by the name that recipes use."""

import lightning

from linvit.tasks.classification import Classification as Classification

TASKS: dict[str, type[lightning.LightningModule]] = {"classification": Classification}
