"""Runs of image classification."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset
from torchmetrics.functional.classification import multiclass_confusion_matrix

from linvit.analysis import answer_figures as figures
from linvit.analysis.answers import BINS, Answers, confused_pairs, expected_calibration_error, per_class
from linvit.analysis.report import figure_image, paragraph, table
from linvit.data.images.cifar import Cifar
from linvit.data.images.digits import Digits
from linvit.data.images.folder import ImageFolder
from linvit.data.images.readers import TimmImages
from linvit.data.source import Source
from linvit.errors import SettingError
from linvit.ranges import Count
from linvit.runs.classifiers import ClassifierSpec, most_probable
from linvit.runs.opening import prepared_for
from linvit.runs.predictions import ClassPrediction, Predictions, check_output
from linvit.runs.rows import in_processes, share
from linvit.runs.spec import Section
from linvit.tasks.classification import Classification

if TYPE_CHECKING:
    from linvit.runs.run import Run

PAIRS, PAIRS_WITH_IMAGES, EXAMPLES = 20, 8, 6
MATRIX_CLASSES = 30  # a confusion matrix of more is not readable

logger = logging.getLogger(__name__)


class ClassificationSpec(ClassifierSpec):
    """Classification with timm networks: one class per image."""

    name = "classification"
    task = Classification
    sources: ClassVar = {"digits": Digits, "imagefolder": ImageFolder, "cifar": Cifar, "timm": TimmImages}
    folder_source = "imagefolder"
    stored_facts: ClassVar = {"split_digest": str | None}

    def stored(self, source: Source) -> dict[str, Any]:
        """A digest of the files held out of a folder that has no split of its own."""
        return {"split_digest": source.digest()} if isinstance(source, ImageFolder) else {}

    def open_source(self, run: "Run", name: str, stored: dict[str, Any], given: dict[str, Any]) -> Source:
        root = stored.get("root")
        if "root" in given:
            stored = {key: value for key, value in stored.items() if key != "class_names"}
        if name == "digits":
            about = run.preprocessing
            stored = {"size": about.size[0], "channels": about.channels} | stored
        source = self.create_source(name, stored | given)
        if isinstance(source, ImageFolder) and "held_out" not in given:
            _hold_out_the_same(run, source, root)
        _match_classes(run, source)
        return prepared_for(run, source, given)

    def predict(
        self,
        run: "Run",
        inputs: Sequence[Any],
        *,
        topk: Count = 5,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
        strips: Mapping[str, Any] | None = None,
        processes: Count = 1,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image.

        Args:
            topk: number of classes.
            processes: number of processes that are started to share the rows of every image, see `linvit.parallel`.
            weights, output, progress, strips: see Run.predict; output is a .csv or .json file.
        """
        if processes == 1:
            return self.predict_each(run, inputs, most_probable(topk), weights, output, progress, strips)
        if strips is not None:
            raise SettingError(
                "`strips` reads images in one process, but `processes` is several: leave one of them out."
            )
        path = None if output is None else check_output(output)
        predictions = in_processes(processes, _predict_sharing_rows, run, inputs, topk, weights)
        if path:
            predictions.save(path)
        return predictions

    def sections(self, run: "Run", source: Source) -> list[Section]:
        answers = answers_of(run, source)
        return [
            ("Accuracy per class", _accuracies(answers)),
            ("Precision, recall and F1 per class", _per_class(answers)),
            ("Most confused classes", _confused(answers, source)),
            ("Calibration", _calibration(answers)),
        ]


SPEC = ClassificationSpec()


def _predict_sharing_rows(
    mesh: DeviceMesh, run: "Run", inputs: Sequence[Any], topk: int, weights: str | None
) -> Predictions[ClassPrediction]:
    share(run.placed_network(weights)[0], mesh)
    return SPEC.predict(run, inputs, topk=topk, weights=weights)


def _hold_out_the_same(run: "Run", source: ImageFolder, trained_on: str | None) -> None:
    """Evaluates on files unseen in training: the held-out ones of the run's folder, or all files of another one."""
    before = run.stored.get("split_digest")
    if before is not None and source.digest() == before:
        return
    if before is None or trained_on is None or source.root.resolve() != Path(trained_on).resolve():
        source.held_out = 1
    else:
        logger.warning(
            "The images in %s have changed since the run was trained: some that are held out now may have been used"
            " for training.",
            source.root,
        )


def _match_classes(run: "Run", source: Source) -> None:
    """Maps a folder's classes to the network's order; for released weights, sorted folders are the class indices.

    Folders named by numbers (ImageNet-V2) that are not class names of the network are its class indices.
    """
    classes, folders = run.class_names, source.class_names
    numbered = all(name.isdecimal() and int(name) < len(classes) for name in folders)
    if numbered and (run.recipe is None or not set(folders) <= set(classes)):
        names = {int(name): name for name in folders}
        source.class_names = [names.get(index, str(index)) for index in range(len(classes))]
        return
    if run.recipe is None:
        if len(classes) != len(folders):
            raise ValueError(
                f"The data has {len(folders)} classes, but the network has {len(classes)}: choose data with the"
                " classes of the network."
            )
        return
    unknown = [name for name in folders if name not in classes]
    if unknown:
        raise ValueError(
            f"The data has the class {unknown[0]!r}, but the network knows {', '.join(classes[:5])}"
            f"{' …' if len(classes) > 5 else ''}: choose data with the classes of the network."
        )
    source.class_names = classes


class _Numbered(Dataset[Any]):
    """Adds the index to each target, to find its image again; sentences on unreadable images pass unchanged."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        return item if isinstance(item, str) else (item[0], torch.tensor([int(item[1]), index]))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


@torch.inference_mode()
def answers_of(run: "Run", source: Source) -> Answers:
    """The network's predictions for all readable validation images; raises ValueError if there are none."""
    network, device = run.placed_network()
    loader = source.val_dataloader()
    numbered = DataLoader(
        _Numbered(loader.dataset),
        batch_sampler=loader.batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
    )
    batches: list[tuple[Tensor, ...]] = []
    for images, targets, _ in numbered:
        if images is not None:
            confidences, predictions = network(images.to(device)).float().softmax(-1).max(-1)
            batches.append((targets[:, 1], targets[:, 0], predictions.cpu(), confidences.cpu()))
    if not batches:
        raise ValueError("The data contains no readable image: choose other data.")
    indices, targets, predictions, confidences = (torch.cat(column) for column in zip(*batches, strict=True))
    return Answers(indices, targets, predictions, confidences, source.class_names)


def _accuracies(answers: Answers) -> Sequence[str]:
    accuracy, counts = per_class(answers)
    known = accuracy[counts > 0]
    words = f"Mean over classes {100 * known.mean():.2f} %, lowest {100 * known.min():.2f} %."
    return [figure_image(figures.class_accuracies(answers), "accuracy per class"), paragraph(words)]


def _per_class(answers: Answers) -> Sequence[str]:
    names = answers.class_names
    confusion = multiclass_confusion_matrix(answers.predictions, answers.targets, len(names))
    right, images, answered = confusion.diag(), confusion.sum(1), confusion.sum(0)
    f1 = 2 * right / (images + answered)  # NaN if a class has no image and is never predicted
    rows = [
        {
            "class": names[place],
            "images": f"{int(images[place]):,}",
            "precision": _percent(right[place] / answered[place]),
            "recall": _percent(right[place] / images[place]),
            "F1": _percent(f1[place]),
        }
        for place in f1.argsort(stable=True).tolist()
    ]
    words = f"Mean F1 over the classes (macro) {_percent(f1.nanmean())}; the lowest are at the top."
    parts = [table(rows), paragraph(words)]
    if len(names) <= MATRIX_CLASSES:
        matrix = figures.confusion_matrix(confusion, names, "images")
        parts.append(figure_image(matrix, "images of each true class by predicted class"))
    return parts


def _percent(share: Tensor) -> str:
    return "–" if share.isnan() else f"{100 * share:.2f} %"


def _confused(answers: Answers, source: Source) -> Sequence[str]:
    pairs = confused_pairs(answers, PAIRS, EXAMPLES)
    wrong = int((~answers.right).sum())
    if not pairs:
        return [paragraph(f"None: all {len(answers.targets):,} images are classified correctly.")]
    rows = [
        {
            "true": answers.class_names[pair.true],
            "predicted": answers.class_names[pair.answered],
            "images": pair.count,
            "of the class": f"{100 * pair.share:.1f} %",
        }
        for pair in pairs
    ]
    dataset = source.val_set()
    shown = figures.confused_images(
        answers, pairs[:PAIRS_WITH_IMAGES], lambda index: source.preprocessing.displayed(dataset[index][0])
    )
    words = f"{wrong:,} of {len(answers.targets):,} images are misclassified; the table shows the most frequent pairs."
    confident = paragraph("Their most confident mistakes:")
    return [paragraph(words), table(rows), confident, figure_image(shown, "misclassified images")]


def _calibration(answers: Answers) -> Sequence[str]:
    confidence, error = answers.confidences.mean().item(), expected_calibration_error(answers)
    words = (
        f"Expected calibration error {100 * error:.2f} % ({BINS} bins of equal width). Mean confidence"
        f" {100 * confidence:.2f} %, accuracy {100 * answers.right.double().mean():.2f} %."
    )
    return [figure_image(figures.calibration_curve(answers), "accuracy against confidence"), paragraph(words)]
