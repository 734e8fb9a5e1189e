"""Shared by alignment and transfer: a linearized network that learns from the network that it was made from."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import timm
import torch
from torch import nn

from linvit.analysis.figures import COLOURS, WIDTH, integer_ticks, subplots
from linvit.analysis.report import figure_image, paragraph, table
from linvit.data.images.cifar import Cifar
from linvit.data.images.digits import Digits
from linvit.data.images.folder import ImageFolder, UnlabelledImages
from linvit.data.images.readers import TimmImages
from linvit.data.source import Source
from linvit.errors import SettingError
from linvit.models.by_name import known_arguments
from linvit.models.linearizing import Origin
from linvit.models.swap import NAME
from linvit.ranges import Count, shown
from linvit.runs.classifiers import ClassifierSpec, most_probable
from linvit.runs.opening import prepared_for
from linvit.runs.predictions import ClassPrediction, Predictions
from linvit.runs.spec import Section
from linvit.tasks.initialization import ALL, copy_weights, initialize
from linvit.tasks.students import StudentTask

if TYPE_CHECKING:
    from linvit.runs.run import Run


class StudentSpec(ClassifierSpec):
    """A task that trains a linearized network on images; labels are ignored.

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
    listing_caption = (
        "The network is `linearized`, made from any softmax network that docs/use/linearize.md names;"
        " `linvit models` lists those of linvit."
    )
    item: ClassVar[str]

    def network(self, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        """The network has the classes of the data, if these have any, unless `model` gives another number."""
        arguments = dict(model)
        name = arguments.pop("name", None)
        if name != NAME:
            raise SettingError(
                f"`name` is {shown(name)}, expected {NAME!r}, with the teacher's model as `base`: set both, and the"
                " `mechanism`."
            )
        arguments.setdefault("in_chans", channels)
        if num_classes:
            arguments.setdefault("num_classes", num_classes)
        with known_arguments(name, arguments):
            return timm.create_model(name, **arguments)

    def taught(self, network: nn.Module, teacher: str | None, copied: str = ALL) -> nn.Module:
        """The teacher of a linearized network, to which its weights are copied.

        Raises ValueError for weights of another network, FileNotFoundError for a missing file.
        """
        origin = cast(Origin, network.origin)
        original = origin.teacher()
        if teacher is not None:
            initialize(original, teacher, same_classes=True)
        copy_weights(network, origin.student(original).state_dict(), copied)
        return original

    def open_source(self, run: "Run", name: str, stored: dict[str, Any], given: dict[str, Any]) -> Source:
        if "root" in given:
            stored = {key: value for key, value in stored.items() if key != "class_names"}
        return prepared_for(run, self.create_source(name, stored | given), given)

    def predict(
        self,
        run: "Run",
        inputs: Sequence[Any],
        *,
        topk: Count = 5,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image, by the classifier that the student has from its teacher.

        Args:
            topk: number of classes; without names of as many classes as the network has, they are numbered.
            weights, output, progress: see Run.predict; output is a .csv or .json file.

        Raises ValueError for a network without a classifier.
        """
        run.class_names = self.classes(run)
        return self.predict_each(run, inputs, most_probable(topk), weights, output, progress)

    def facts(self, run: "Run", source: Source) -> tuple[str, ...]:
        model = (run.recipe or {}).get("model", {})
        base = model.get("base")
        height, width = source.preprocessing.size
        made = f"made from {base['name'] if isinstance(base, dict) else base or 'deit_tiny_patch16_224'}"
        return (made, str(model.get("mechanism", "mala")), f"pattern {run.network.pattern}", f"{height}×{width} px")

    def classes(self, run: "Run") -> list[str]:
        """The classes of the student's classifier; numbers, if the data name another number of classes.

        Raises ValueError if there is none.
        """
        count = cast(int, run.network.num_classes)
        if not count:
            raise SettingError(
                f"The network of {run.path} has no classifier, so it cannot predict: train one from it with the task"
                " classification and `init`."
            )
        return run.class_names if len(run.class_names) == count else [str(index) for index in range(count)]

    @torch.inference_mode()
    def sections(self, run: "Run", source: Source) -> list[Section]:
        """The error of each block or map: table and figure."""
        task = cast(StudentTask, run.task)
        network, device = run.placed_network()
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

    def listing(self) -> Any:
        return iter(())
