"""Runs in which a network, linearized or of another shape, learns from its teacher: block by block, or as a whole."""

from pathlib import Path
from typing import Any, ClassVar, cast

import timm
import torch
from torch import nn

from linvit.analysis.figures import COLOURS, WIDTH, integer_ticks, subplots
from linvit.analysis.report import figure_image, paragraph, table
from linvit.data.images.folder import ImageFolder, UnlabelledImages
from linvit.data.images.readers import TimmImages
from linvit.data.images.small import Cifar, Digits
from linvit.data.source import Source
from linvit.errors import SettingError, keys_of, quoted, refuse
from linvit.models.by_name import create_classifier, known_arguments
from linvit.models.linearizing import Origin, lessons, share
from linvit.models.swap import NAME
from linvit.ranges import Count, checked
from linvit.runs.classifiers import ClassifierRun, most_probable
from linvit.runs.evaluate import prepared_for
from linvit.runs.images import as_list
from linvit.runs.predictions import ClassPrediction, Predictions
from linvit.runs.report import Section
from linvit.runs.trained import Trained
from linvit.tasks.alignment import MAPS, OUTPUTS, Alignment
from linvit.tasks.classification import Classification
from linvit.tasks.initialization import ALL, copy_weights, initialize
from linvit.tasks.students import StudentTask, Transfer
from linvit.tasks.task import Task


class StudentRun(ClassifierRun):
    """A run of a linearized network that learns from its teacher; labels are ignored.

    A subclass has `item`, what has an error of its own.
    """

    sources: ClassVar = {
        "images": UnlabelledImages,
        "digits": Digits,
        "imagefolder": ImageFolder,
        "cifar": Cifar,
        "timm": TimmImages,
    }
    folder_source = "images"
    learns_classes = False
    item: ClassVar[str]

    @classmethod
    def create_network(cls, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        """The network has the classes of the data, if these have any, unless `model` gives another number."""
        arguments = dict(model)
        name = arguments.pop("name", None)
        if name != NAME:
            raise SettingError(
                f"`name` is {quoted(name)}, expected {NAME!r}, with the teacher's model as `base`: set both, and the"
                " `mechanism`."
            )
        arguments.setdefault("in_chans", channels)
        if num_classes:
            arguments.setdefault("num_classes", num_classes)
        with known_arguments(name, arguments):
            return timm.create_model(name, **arguments)

    @classmethod
    def create_teacher(cls, network: nn.Module, teacher: str | None, copied: str = ALL) -> nn.Module:
        """The teacher of a linearized network, to which its weights are copied.

        Raises ValueError for weights of another network, FileNotFoundError for a missing file.
        """
        origin = cast(Origin, network.origin)
        original = origin.teacher()
        if teacher is not None:
            initialize(original, teacher, same_classes=True)
        copy_weights(network, origin.student(original).state_dict(), copied)
        return original

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        if "root" in changes:
            stored = {key: value for key, value in stored.items() if key != "class_names"}
        return prepared_for(self, self.create_source(name, stored | changes), changes)

    @checked
    def predict(
        self,
        inputs: Any,
        *,
        topk: Count = 5,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image, by the classifier that the student has from its teacher.

        Args:
            inputs: a path, or a sequence of paths, PIL images or arrays (uint8, height × width × 3); folders are
                searched.
            topk: number of classes; without names of as many classes as the network has, they are numbered.
            weights: "raw" or "ema"; default: the moving average, if there is one.
            output: a .csv or .json file to write as well.
            progress: show a progress bar.
        """
        self.class_names = self.classes()
        return self.predict_each(as_list(inputs), most_probable(topk), weights, output, progress)

    def facts(self, source: Source) -> tuple[str, ...]:
        recipe = self.recipe or {}
        model, other = recipe.get("model", {}), recipe.get("task", {}).get("teacher_model")
        base = other or model.get("base") or "deit_tiny_patch16_224"
        name, (height, width) = base["name"] if isinstance(base, dict) else base, source.preprocessing.size
        size = f"{height}×{width} px"
        if other:
            return (f"taught by {name}", size)
        return (f"made from {name}", str(model.get("mechanism", "mala")), f"pattern {self.network.pattern}", size)

    def classes(self) -> list[str]:
        """The classes of the student's classifier; numbers, if the data name another number of classes."""
        count = cast(int, self.network.num_classes)
        if not count:
            raise SettingError(
                f"The network of {self.path} has no classifier, so it cannot predict: train one from it with the task"
                " classification and `init`."
            )
        return self.class_names if len(self.class_names) == count else [str(index) for index in range(count)]

    @torch.inference_mode()
    def sections(self, source: Source) -> list[Section]:
        """The error of each block or map: table and figure."""
        task = cast(StudentTask, self.task)
        network, device = self.placed_network()
        task.to(device).eval()
        total, images = torch.zeros(len(task.names), dtype=torch.float64), 0
        for batch in source.val_dataloader():
            if batch[0] is not None:
                errors = task.errors(network, batch[0].to(device))
                total += errors.double().sum(1).cpu()
                images += errors.shape[1]
        means = (total / images).tolist()
        rows = [
            {self.item: name, "relative error": f"{error:.4f}"} for name, error in zip(task.names, means, strict=True)
        ]
        figure, axes = subplots((WIDTH, 2.6))
        axes.bar(range(1, len(means) + 1), means, color=COLOURS[0])
        axes.set(xlabel=f"{self.item}, in the order of the network", ylabel="relative error", ylim=(0, None))
        integer_ticks(axes.xaxis)
        words = (
            f"|student - teacher|² / |teacher|² of each {self.item}, averaged over {images:,} held-out images: 0 is"
            " equal, 1 as far away as an output of zeros."
        )
        parts = [figure_image(figure, f"relative error of each {self.item}"), table(rows), paragraph(words)]
        return [(f"Relative error per {self.item}", parts)]

    def exported(self) -> Trained:
        """The student as a classifier; raises ValueError for a network without one."""
        names = self.classes()
        task = Classification(self.network, len(names), self.preprocessing.channels)
        return Trained(task, names, self.preprocessing, self.path, self.name, self.recipe, self.stored)


class AlignmentRun(StudentRun):
    """A run in which each linear attention learns from the attention that it replaces."""

    task_name = "alignment"
    task_class = Alignment
    kept = ("match",)
    item = "block"

    @classmethod
    def create_task(cls, network: nn.Module, num_classes: int, channels: int = 3, **settings: Any) -> Task:
        original = cls.create_teacher(network, settings.get("teacher"), settings.get("copied", ALL))
        taught = lessons(network, original, scores=settings.get("match", OUTPUTS) == MAPS)
        share(network, original, taught)
        return Alignment(network, original=original, lessons=taught, num_classes=num_classes, **settings)


class TransferRun(StudentRun):
    """A run in which a linearized network, or one of another shape, learns the features of its teacher."""

    task_name = "transfer"
    task_class = Transfer
    kept = ("features", "teacher_model")
    item = "map"

    @classmethod
    def create_network(cls, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        """A student of another shape has no classifier, unless `model` gives a number of classes."""
        if model.get("name") == NAME:
            return super().create_network(model, num_classes, channels)
        return create_classifier(model, model.get("num_classes", 0), channels)

    @classmethod
    def create_task(cls, network: nn.Module, num_classes: int, channels: int = 3, **settings: Any) -> Task:
        model, weights = settings.get("teacher_model"), settings.get("teacher")
        refuse(
            (model is None) != hasattr(network, "origin")
            and f"`teacher_model` is {quoted(model)}, expected a model for a student of another shape, and null for a"
            " linearized one, whose `model.base` is its teacher: change it."
        )
        if model is None:
            original = cls.create_teacher(network, weights, settings.get("copied", ALL))
        else:
            arguments = {"name": model} if isinstance(model, str) else model
            with keys_of("task.teacher_model"):
                original = create_classifier({**arguments, "num_classes": 1}, 1, channels)
            if weights is not None:
                initialize(original, weights, same_classes=False)
            cast(Any, original).reset_classifier(0)
        return Transfer(network, original=original, num_classes=num_classes, **settings)
