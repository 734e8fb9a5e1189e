"""Runs of image classification."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.device_mesh import DeviceMesh

from linvit.data.images.folder import ImageFolder
from linvit.data.images.readers import TimmImages
from linvit.data.images.small import Cifar, Digits
from linvit.data.source import Source
from linvit.errors import refuse
from linvit.files import check_output_file, check_writable, user_path
from linvit.ranges import Count, checked
from linvit.released import check_target
from linvit.runs.classifiers import ClassifierRun, most_probable
from linvit.runs.evaluate import Measures, prepared_for
from linvit.runs.hub import Pushed, check_access, check_repository, upload, write_hub_folder
from linvit.runs.images import as_list
from linvit.runs.predictions import ENDINGS, ClassPrediction, Predictions
from linvit.runs.report import Section, answer_sections
from linvit.runs.rows import SharedRows, in_processes, share
from linvit.runs.weight_file import origin_of, write_weight_file
from linvit.tasks.classification import Classification

logger = logging.getLogger(__name__)


class ClassificationRun(ClassifierRun):
    """A run of a timm network that gives every image one class."""

    task_name = "classification"
    task_class = Classification
    sources: ClassVar = {"digits": Digits, "imagefolder": ImageFolder, "cifar": Cifar, "timm": TimmImages}
    folder_source = "imagefolder"
    stored_facts: ClassVar = {"split_digest": str | None}

    @classmethod
    def facts_to_store(cls, source: Source) -> dict[str, Any]:
        """A digest of the files held out of a folder that has no split of its own."""
        return {"split_digest": source.digest()} if isinstance(source, ImageFolder) else {}

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        root = stored.get("root")
        if "root" in changes:
            stored = {key: value for key, value in stored.items() if key != "class_names"}
        if name == "digits":
            preprocessing = self.preprocessing
            stored = {"size": preprocessing.size[0], "channels": preprocessing.channels} | stored
        source = self.create_source(name, stored | changes)
        if isinstance(source, ImageFolder) and "held_out" not in changes:
            self._hold_out_the_same(source, root)
        self._match_classes(source)
        return prepared_for(self, source, changes)

    def _hold_out_the_same(self, source: ImageFolder, trained_on: str | None) -> None:
        """Evaluates on files unseen in training: the held-out ones of the run's folder, or all of another one."""
        digest = self.stored.get("split_digest")
        if digest is not None and source.digest() == digest:
            return
        if digest is None or trained_on is None or source.root.resolve() != Path(trained_on).resolve():
            source.held_out = 1
        else:
            logger.warning(
                "The images in %s have changed since the run was trained: some that are held out now may have been used"
                " for training.",
                source.root,
            )

    def _match_classes(self, source: Source) -> None:
        """Maps a folder's classes to the network's order; for released weights, sorted folders are the class indices.

        Folders named by numbers (ImageNet-V2) that are not class names of the network are its class indices.
        """
        classes, folders = self.class_names, source.class_names
        numbered = all(name.isdecimal() and int(name) < len(classes) for name in folders)
        if numbered and (self.recipe is None or not set(folders) <= set(classes)):
            names = {int(name): name for name in folders}
            source.class_names = [names.get(index, str(index)) for index in range(len(classes))]
            return
        released = self.recipe is None
        unknown = next((name for name in folders if name not in classes), None)
        refuse(
            released
            and len(classes) != len(folders)
            and f"The data has {len(folders)} classes, but the network has {len(classes)}: choose data with the classes"
            " of the network.",
            not released
            and unknown is not None
            and f"The data has the class {unknown!r}, but the network knows {', '.join(classes[:5])}"
            f"{' …' if len(classes) > 5 else ''}: choose data with the classes of the network.",
        )
        if released:
            return
        source.class_names = classes

    @checked
    def evaluate(
        self,
        data: str | Path | None = None,
        progress: bool = False,
        trainer: Mapping[str, Any] | None = None,
        *,
        processes: Count = 1,
        **overrides: Any,
    ) -> Measures:
        """Loss, top-1 and top-5 over all held-out images.

        Args:
            data, overrides: see `source`.
            progress: show a progress bar in the terminal.
            trainer: arguments of Lightning's Trainer, such as devices and precision.
            processes: number of processes that are started to share the rows of every image, see `linvit.parallel`.
        """
        if processes == 1:
            return super().evaluate(data, progress, trainer, **overrides)
        return in_processes(processes, _evaluate_sharing_rows, self, data, progress, trainer, overrides)

    @checked
    def predict(
        self,
        inputs: Any,
        *,
        topk: Count = 5,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
        strips: Mapping[str, Any] | None = None,
        processes: Count = 1,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image, with `to_csv`, `to_json` and `save`.

        Args:
            inputs: a path, or a sequence of paths, PIL images or arrays (uint8, height × width × 3); folders are
                searched.
            topk: number of classes.
            weights: "raw" or "ema"; default: the moving average, if there is one.
            output: a .csv or .json file to write as well.
            progress: show a progress bar.
            strips: a dictionary, even an empty one, reads every image at its own size and strip by strip, on the CPU;
                its entries are rows, memory, spill and progress of `linvit.run_in_strips`.
            processes: number of processes that are started to share the rows of every image, see `linvit.parallel`.

        Files that cannot be read are listed in `unreadable` of the result.
        """
        inputs = as_list(inputs)
        if processes == 1:
            return self.predict_each(inputs, most_probable(topk), weights, output, progress, strips)
        refuse(
            strips is not None
            and "`strips` reads images in one process, but `processes` is several: leave one of them out."
        )
        path = None if output is None else check_output_file(output, ENDINGS)
        predictions = in_processes(processes, _predict_sharing_rows, self, inputs, topk, weights)
        if path:
            predictions.save(path)
        return predictions

    def sections(self, source: Source) -> list[Section]:
        return answer_sections(self, source)

    @checked
    def save_weights(
        self,
        path: str | Path,
        *,
        half: bool = False,
        note: str | None = None,
        license: str | None = None,
        measures: Measures | None = None,
        progress: bool = False,
        **overrides: Any,
    ) -> Path:
        """Writes the weights to a file that timm reads, and its model card next to it, as .md.

        Args:
            path: the file, ending in .safetensors; existing files are replaced.
            half: round the weights to float16, which halves the file.
            note: a sentence about data or limits, for header and card.
            license: of the weights, in the notation of the Hugging Face hub, such as "apache-2.0"; None names none.
            measures: of these weights on the same data; by default they are evaluated here, as rounded.
            progress: show a progress bar.
            overrides: root, batch_size or num_workers, if the run's data have moved, see `source`.

        Returns:
            The file's path. The moving average of the weights is written if there is one.

        Raises:
            ValueError: for a run without recipe, another ending, weights too large for float16, other settings of the
                data, and as `source`.
            FileNotFoundError: if the folder does not exist.
        """
        target = check_target(path)
        origin = origin_of(self, overrides, half=half, note=note, license=license, measures=measures, progress=progress)
        return write_weight_file(origin, target)

    @checked
    def push_to_hub(
        self,
        repository: str,
        *,
        folder: str | Path | None = None,
        dry_run: bool = False,
        public: bool = False,
        note: str | None = None,
        license: str | None = None,
        measures: Measures | None = None,
        progress: bool = False,
        **overrides: Any,
    ) -> Pushed:
        """Writes the run to a folder as on the Hugging Face hub, and uploads it.

        The folder has the weights (float32, the moving average if there is one), timm's config.json, the model card,
        the recipe without paths, the training curves, and a file for transformers' `trust_remote_code`.

        Args:
            repository: the name on the hub, as user/name. It is created if it does not exist.
            folder: to write the files to; default: hub in the run's folder. Files of these names are replaced.
            dry_run: only write the folder; nothing is sent and no account is needed.
            public: everybody can read the repository; by default only its owner can.
            note, license, measures, progress, overrides: see `save_weights`.

        Raises:
            ValueError: for a name that is not user/name, a run without recipe, weights or data, an account that may not
                write there, and a repository that is public although `public` is not set, or private although it is.
            ConnectionError: if the hub cannot be reached; the folder remains.
        """
        check_repository(repository)
        if not dry_run:
            check_access(repository, public)
        target = self.folder / "hub" if folder is None else user_path(folder)
        check_writable(target)
        origin = origin_of(self, overrides, note=note, license=license, measures=measures, progress=progress)
        files = write_hub_folder(origin, target, repository)
        return Pushed(target, files, None if dry_run else upload(target, files, repository, public))


def _evaluate_sharing_rows(
    mesh: DeviceMesh,
    run: ClassificationRun,
    data: str | Path | None,
    progress: bool,
    trainer: Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
) -> Measures:
    settings = {**(trainer or {}), "callbacks": [SharedRows(mesh.size(), mesh)]}
    return run.evaluate(data, progress and mesh.get_local_rank() == 0, settings, **overrides)


def _predict_sharing_rows(
    mesh: DeviceMesh, run: ClassificationRun, inputs: list[Any], topk: int, weights: str | None
) -> Predictions[ClassPrediction]:
    share(run.placed_network(weights)[0], mesh)
    return run.predict(inputs, topk=topk, weights=weights)
