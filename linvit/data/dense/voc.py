"""Objects with boxes in Pascal VOC's layout: Annotations/*.xml, JPEGImages/ and ImageSets/Main/*.txt."""

from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from linvit.data.dense.annotations import Annotations, Collected, is_number_in_text
from linvit.data.dense.objects import HeldOutObjects
from linvit.data.disk import check_regular, data_folder, files_below, files_by_name, read_lines, stays_inside
from linvit.data.images.image import SUFFIXES, CorruptImageError, size_of
from linvit.errors import SettingError, quoted, refuse
from linvit.files import explained

LISTS = Path("ImageSets", "Main")
SIDES = ("xmin", "ymin", "xmax", "ymax")


class Voc(HeldOutObjects):
    """Objects in Pascal VOC's format; an object that is marked as difficult is a crowd, which is not scored.

    root: folder with Annotations/*.xml, JPEGImages/ and, optionally, ImageSets/Main/*.txt. train, val: names of the
    lists in ImageSets/Main; without lists, a share held_out of the images is held out. held_out, split, options: see
    HeldOutObjects. class_names: the classes and their order; by default the names in all files of Annotations/, sorted.
    """

    fixed = ("needs_masks",)

    def __init__(self, root: str, train: str = "train", val: str = "val", **options: Any) -> None:
        self.lists = {"train": train, "val": val}
        super().__init__(root, needs_masks=False, **options)

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        if not (root / "Annotations").is_dir() or not (root / "JPEGImages").is_dir():
            return None
        lists = {path.stem for path in (root / LISTS).glob("*.txt")}
        others = {"train": "trainval", "val": "test"}
        chosen = {split: other for split, other in others.items() if split not in lists and other in lists}
        return {"name": "voc", "root": str(root)} | chosen

    def folder(self, split: str) -> Path:
        return data_folder(self.root / "JPEGImages")

    def read(self, split: str, class_names: list[str] | None) -> Annotations:
        folder = data_folder(self.root / "Annotations")
        files = {path.stem: path for path in files_below(folder, (".xml",)) if path.parent == folder}
        names = self._names(split, list(files))
        wanted = set(names)
        missing = [name for name in names if name not in files]
        documents: dict[str, tuple[tuple[int, int] | None, list[_Object | str]]] = {}
        damaged = [f"{folder / name}.xml does not exist: add it, or remove its line from the list." for name in missing]
        for name, path in files.items():
            if class_names is not None and name not in wanted:
                continue
            try:
                documents[name] = read_document(path)
            except ValueError as error:
                damaged += [str(error)] if name in wanted else []
        everything = [item for _, items in documents.values() for item in items]
        classes = class_names or sorted({item.name for item in everything if isinstance(item, _Object)})
        faults = [*damaged, *(item for item in everything if isinstance(item, str))]
        nothing = f"The annotations in {folder} name no object: set `root` to other data."
        refuse(not classes and next(iter(faults), nothing))
        collected = Collected(classes)
        collected.unusable += damaged
        images = files_by_name(self.folder(split), SUFFIXES, collected.unusable)
        for name in filter(documents.__contains__, names):
            path, image, (size, items) = files[name], images.get(name), documents[name]
            if image is None:
                collected.unusable.append(f"{path} has no image {name} in JPEGImages: add it, or remove the file.")
                continue
            try:
                collected.add_image(image.name, size or size_of(image))
            except CorruptImageError as error:
                collected.unusable.append(str(error))
                continue
            for number, item in enumerate(items, start=1):
                place = f"{path}, object {number}"
                if isinstance(item, str):
                    collected.complaints.append(item)
                elif item.name not in classes:
                    complaint = f"{place} has the unknown class {quoted(item.name)}: correct or remove it."
                    collected.complaints.append(complaint)
                else:
                    collected.add_object(place, classes.index(item.name), bbox=item.box, iscrowd=int(item.is_difficult))
        return collected.annotations(folder, needs_masks=False)

    def _names(self, split: str, all_names: list[str]) -> list[str]:
        """The names of a split's images, from its list, or by a hash if there are no lists."""
        folder = self.root / LISTS
        paths = {key: folder / f"{name}.txt" for key, name in self.lists.items()}
        if not any(path.exists() for path in paths.values()):
            return self.divided(all_names, split)
        if not paths[split].exists():
            known = ", ".join(sorted(path.stem for path in folder.glob("*.txt"))) or "no lists"
            raise SettingError(f"The list {paths[split]} does not exist: set `{split}` to one of {known}.")
        names = read_lines(paths[split])
        outside = [name for name in names if not stays_inside(name)]
        if outside:
            raise ValueError(
                f"{paths[split]} has the name {quoted(outside[0])}, expected that of an image: correct it."
            )
        return list(dict.fromkeys(names))


class _Object(NamedTuple):
    name: str
    box: list[float]
    is_difficult: bool


class _Builder(ElementTree.TreeBuilder):
    """Refuses documents that could define entities, which may grow without bound or name other files."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a document type declaration")


def read_document(path: Path) -> tuple[tuple[int, int] | None, list[_Object | str]]:
    """The size (height, width) that a file states, if it does, and its objects; boxes are x, y, width, height from 0.

    VOC's boxes count pixels from 1, and their last pixel belongs to the object.
    """
    with explained(lambda reason: f"{path} is not a readable XML file ({reason}): replace the file."):
        check_regular(path)
        tree = ElementTree.parse(path, ElementTree.XMLParser(target=_Builder())).getroot()
    sides = {name: tree.findtext(f"size/{name}", "0").strip() for name in ("height", "width")}
    refuse(
        tree.tag != "annotation"
        and f"{path} has the element {quoted(tree.tag)}, expected VOC's <annotation>: replace the file.",
        *(
            not is_number_in_text(text) and f"{path} has {quoted(text)} as {name}, expected a number: correct it."
            for name, text in sides.items()
        ),
    )
    objects: list[_Object | str] = []
    for number, item in enumerate(tree.findall("object"), start=1):
        name = item.findtext("name", "").strip()
        texts = {side: item.findtext(f"bndbox/{side}", "").strip() for side in SIDES}
        odd = next((side for side, text in texts.items() if not is_number_in_text(text)), "")
        if odd or not name:
            fault = f"has {quoted(texts[odd])} as {odd}, expected a number of pixels" if name else "has no name"
            objects.append(f"{path}, object {number} {fault}: correct or remove it.")
            continue
        left, top, right, bottom = map(float, texts.values())
        box = [left - 1, top - 1, right - left + 1, bottom - top + 1]
        is_difficult = item.findtext("difficult", "").strip().lower() in ("1", "true")
        objects.append(_Object(name, box, is_difficult))
    height, width = (int(float(text)) for text in sides.values())
    return (height, width) if min(height, width) >= 1 else None, objects
