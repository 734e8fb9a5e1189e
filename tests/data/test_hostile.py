"""Every reader gives an item or one sentence for whatever lies in its folder: no other error, no hang."""

import copy
import json
import re
from functools import partial
from random import Random

import hostile
import numpy as np
import pytest
import soundfile
from PIL import Image

from linvit.data.dense import Ade20k, CocoPanoptic, InstanceMasks, Voc, Yolo
from linvit.data.dense.annotations import read_annotations
from linvit.data.dense.coco import Coco
from linvit.data.generation import Latents
from linvit.data.images import ImageFolder, TimmImages
from linvit.data.images.folder import survey
from linvit.data.images.image import open_image
from linvit.data.images.multilabel import MultiLabelImages
from linvit.data.speech.audio import read_audio
from linvit.data.speech.librispeech import LibriSpeech
from linvit.data.text.files import TextFolder

guarded = partial(hostile.limits, 60, 4 << 30)
OPTIONS = {"size": 32, "num_workers": 0, "batch_size": 1, "auto_augment": None}


def is_sentence(text):
    return bool(text.strip()) and not any(word in text for word in ("\n", "Traceback", "Error", "memory", "allocate"))


def outcome(make):
    """What make() gives and "", or None and the sentence in which it ends."""
    try:
        with guarded():
            return make(), ""
    except (ValueError, OSError) as error:
        sentence = str(error)
    assert is_sentence(sentence), sentence
    return None, sentence


def refused(make):
    return outcome(make)[0]


def read_all(*datasets):
    """The items of data sets, by whether they are sentences."""
    with guarded():
        samples = [dataset[index] for dataset in datasets for index in range(len(dataset))]
    sentences = [sample for sample in samples if isinstance(sample, str)]
    assert all(map(is_sentence, sentences)), sentences
    return len(samples) - len(sentences), sentences


def good_image(path, size=(48, 40)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (9, 99, 199)).save(path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    paths = hostile.write_hostile_images(folder / "odd", Random(0))
    good_image(folder / "good" / "a.png")
    good_image(folder / "good" / "b.png")
    return folder, paths


READABLE = ("rotated.jpg", "broken_exif.jpg", "mode_", "animated.webp", "one_pixel.png", "damaged_")
UNREADABLE = {
    "zero_bytes.jpg": "its format is unknown",
    "text.jpg": "its format is unknown",
    "claims_a_billion_pixels.png": "decompression bomb",
    "claims_a_long_row.png": "1×65,000 px, over 1,000 times as long as wide",
    "pipe.png": "a pipe, a socket or a device, not a regular file",
    "socket.png": "a pipe, a socket or a device, not a regular file",
    "device.png": "a pipe, a socket or a device, not a regular file",
    "folder.png": "it is a folder",
    "dangling.png": "there is no such file",
    "loop.png": "there is no such file",
}


def test_an_odd_image_is_read_or_refused_in_a_sentence(images):
    for path in images[1]:
        image, sentence = outcome(lambda path=path: open_image(path, 3))
        grey, same = outcome(lambda path=path: open_image(str(path), 1))
        assert sentence == same or path.stem == "mode_LAB"  # of which Pillow converts only the brightness
        if image and grey:
            assert path.name.startswith(READABLE), path.name
            assert (image.mode, grey.mode) == ("RGB", "L")
        else:
            unknown = path.stem in ("mode_F", "mode_I")
            says = " values, whose range is unknown" if unknown else " is not a readable image ("
            assert re.search(re.escape(str(path)) + ".*" + re.escape(says), sentence + same)
            assert UNREADABLE.get(path.name, "") in sentence
            assert not path.name.startswith(READABLE) or path.name.startswith(("damaged_", "mode_LAB")) or unknown


def test_image_folders_leave_odd_images_out(images):
    folder, paths = images
    for source in (
        ImageFolder(str(folder), held_out=0.5, **OPTIONS),
        ImageFolder(str(folder), held_out=0.5, channels=1, **OPTIONS),
    ):
        read, sentences = read_all(source.train_set(), source.val_set())
        assert read + len(sentences) == len(paths) + 2
        assert len(sentences) > 15
    with guarded():
        found = survey(source)
    assert all(map(is_sentence, found.unreadable))
    assert found.side > 0


def test_timms_folder_reader_leaves_odd_images_out(images, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(images[0])
    source = refused(lambda: TimmImages(str(tmp_path), **OPTIONS))
    read, sentences = read_all(source.val_set())
    assert read > 10
    assert any("pipe.png" in sentence for sentence in sentences)


def test_multi_label_tables_may_list_odd_images(images):
    folder, paths = images
    names = [f"odd/{path.name}" for path in paths if path.exists()]
    (folder / "labels.csv").write_text("\n".join(["file,labels", "good/a.png,cat", *(f"{name},dog" for name in names)]))
    read, sentences = read_all(MultiLabelImages(str(folder), held_out=1.0, **OPTIONS).val_set())
    assert read + len(sentences) == len(names) + 1


def test_detection_and_segmentation_leave_odd_images_and_maps_out(images, tmp_path):
    coco, maps = tmp_path / "coco", tmp_path / "maps"
    content = hostile.coco_content()
    content["images"] = [
        {"id": number, "file_name": path.name, "height": 40, "width": 48} for number, path in enumerate(images[1])
    ]
    content["annotations"] = []
    (coco / "annotations").mkdir(parents=True)
    (coco / "annotations" / "instances_val.json").write_text(json.dumps(content))
    (coco / "val").symlink_to(images[1][0].parent)
    read, sentences = read_all(Coco(str(coco), long_side=64, short_side=32, num_workers=0).val_set())
    assert read + len(sentences) == len(images[1])
    for kind, other in (("images", "annotations"), ("annotations", "images")):
        root = maps / kind
        (root / kind).mkdir(parents=True)
        (root / kind / "validation").symlink_to(images[1][0].parent)
        for path in images[1]:
            good_image(root / other / "validation" / f"{path.stem}.png")
        source = Ade20k(str(root), long_side=64, short_side=32, num_labels=4, num_workers=0, max_corrupt=1000)
        assert len(read_all(source.val_set())[1]) > 15


def test_other_formats_of_objects_leave_odd_images_out(images, tmp_path):
    folder, paths = images
    for root in (tmp_path / "voc", tmp_path / "yolo", tmp_path / "masks"):
        root.mkdir()
    (tmp_path / "voc" / "JPEGImages").symlink_to(folder / "odd")
    (tmp_path / "voc" / "Annotations").mkdir()
    (tmp_path / "yolo" / "val").symlink_to(folder / "odd")
    for number, path in enumerate(paths):
        (tmp_path / "voc" / "Annotations" / f"{path.stem}.xml").write_text("<annotation/>")
        (tmp_path / "masks" / f"{number}" / "masks").mkdir(parents=True)
        (tmp_path / "masks" / f"{number}" / "images").mkdir()
        (tmp_path / "masks" / f"{number}" / "images" / "a.png").symlink_to(path)
        (tmp_path / "masks" / f"{number}" / "masks" / "0.png").symlink_to(path)
    (paths[0].parent / "mode_L.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    options = {"num_workers": 0, "held_out": 1.0, "max_corrupt": 1000, "max_bad_annotations": 1000}
    for make in (
        lambda: Voc(str(tmp_path / "voc"), class_names=["cat"], **options),
        lambda: Yolo(str(tmp_path / "yolo"), class_names=["cat"], needs_masks=False, **options),
        lambda: InstanceMasks(str(tmp_path / "masks"), **options),
    ):
        source = refused(make)
        known = source.annotations("val")
        assert all(map(is_sentence, [*known.unusable, *known.complaints]))
        assert len(known.unusable) > 10
        assert read_all(source.val_set())[0] > 10
    (paths[0].parent / "mode_L.txt").unlink()


def test_odd_annotations_of_other_formats_are_read_or_refused_in_a_sentence(tmp_path):
    good_image(tmp_path / "JPEGImages" / "a.png")
    good_image(tmp_path / "val" / "a.png")
    (tmp_path / "Annotations").mkdir()
    texts = hostile.write_hostile_text(tmp_path / "texts", Random(0), text="0 0.5 0.5 0.5 0.5\n")
    for path in [*texts, *hostile.write_hostile_json(tmp_path / "json", Random(0))]:
        for place in (tmp_path / "Annotations" / "a.xml", tmp_path / "val" / "a.txt"):
            place.unlink(missing_ok=True)
            place.symlink_to(path)
        limits = {"max_corrupt": 99, "max_bad_annotations": 99, "num_workers": 0}
        for source in (
            refused(lambda limits=limits: Voc(str(tmp_path), class_names=["cat"], held_out=1.0, **limits)),
            refused(lambda limits=limits: Yolo(str(tmp_path), class_names=["cat"], needs_masks=False, **limits)),
        ):
            known = source and source.annotations("val")
            assert not known or all(map(is_sentence, [*known.unusable, *known.complaints]))
        (tmp_path / "data.yaml").unlink(missing_ok=True)
        (tmp_path / "data.yaml").symlink_to(path)
        refused(lambda limits=limits: Yolo(str(tmp_path), needs_masks=False, **limits))
        (tmp_path / "data.yaml").unlink()
        root = tmp_path / f"as_{path.name}" / "annotations"
        root.mkdir(parents=True)
        path.rename(root / "panoptic_val.json")
        assert refused(lambda root=root: CocoPanoptic(str(root.parent), num_workers=0)) is None


def test_odd_sound_is_read_or_refused_in_a_sentence(tmp_path):
    read = []
    for path in hostile.write_hostile_audio(tmp_path, Random(0)):
        samples, sentence = outcome(lambda path=path: read_audio(path, 16_000))
        assert str(path) in sentence if samples is None else np.isfinite(samples.numpy()).all()
        read += [] if samples is None else [path.name]
    assert "claims_hours.wav" not in read
    assert not {"one_hertz.wav", "a_gigahertz.wav", "no_channels.wav", "pipe.wav", "device.wav"} & set(read)


def test_speech_leaves_odd_sound_out_and_refuses_odd_transcripts(tmp_path):
    chapter = tmp_path / "train" / "1" / "2"
    chapter.mkdir(parents=True)
    sounds = [path for path in hostile.write_hostile_audio(chapter, Random(0)) if path.suffix in (".wav", ".flac")]
    sounds = [path for path in sounds if path.stem != "claims_hours" or path.unlink()]
    soundfile.write(chapter / "good.wav", np.random.default_rng(0).normal(0, 0.1, 16_000), 16_000)
    (chapter / "1-2.trans.txt").write_text(
        "".join(f"{path.stem} ONE TWO\n" for path in [*sounds, chapter / "good.wav"])
    )
    (tmp_path / "val").symlink_to(tmp_path / "train")
    source = refused(lambda: LibriSpeech(str(tmp_path), mels=8))
    read, sentences = read_all(source.val_set())
    assert read >= 1
    assert len(sentences) > 8
    (chapter / "good.wav").unlink()
    with guarded(), pytest.raises(ValueError, match=r"^None of the \d+ sound files|there is no good\.flac"):
        LibriSpeech(str(tmp_path), mels=8).train_set()
    for path in hostile.write_hostile_text(tmp_path / "texts", Random(0), text="good ONE\n"):
        good = tmp_path / f"as_{path.name}" / "train"
        good.mkdir(parents=True)
        soundfile.write(good / "good.wav", np.zeros(16_000), 16_000)
        path.rename(good / "1.trans.txt")
        refused(lambda root=good.parent: LibriSpeech(str(root), mels=8).utterances("train"))


def test_a_table_or_text_in_an_odd_encoding_is_read_or_refused(tmp_path):
    good_image(tmp_path / "a.png")
    table = "file,labels,split\na.png,cat|dog,val\n"
    readable = []
    for path in hostile.write_hostile_text(tmp_path, Random(0), "csv", table):
        source = refused(lambda path=path: MultiLabelImages(str(tmp_path), str(path), **OPTIONS))
        readable += [path.stem] if source else []
    assert readable == ["with_mark", "crlf", "separators"]
    for number, path in enumerate(hostile.write_hostile_text(tmp_path / "texts", Random(0))):
        root = tmp_path / str(number)
        (root / "val").mkdir(parents=True)
        for good in (root / "good.txt", root / "val" / "good.txt"):
            good.write_text("good\n" * 1000)
        path.rename(root / "val" / path.name)
        (root / "val" / "._x.txt").write_text("hidden")
        source = refused(lambda root=root: TextFolder(str(root), context=512))
        if source and refused(source.val_set):
            read_all(source.train_set(), source.val_set())
            assert len(source.files["val"]) == 2


def test_odd_json_is_refused_in_a_sentence(tmp_path):
    for path in hostile.write_hostile_json(tmp_path, Random(0)):
        known = refused(lambda path=path: read_annotations(path))
        assert known is None or all(map(is_sentence, known.complaints))
        assert known is None or path.stem in ("with_mark", "deep_box", "infinite")
        root = tmp_path / f"as_{path.stem}"
        root.mkdir()
        path.rename(root / "latents.json")
        assert refused(lambda root=root: Latents(str(root))) is None


FIELDS = [
    (kind, key) for kind, entries in hostile.coco_content().items() for key in [*entries[0], None]
]  # None: the entry itself


@pytest.mark.parametrize(("kind", "key"), FIELDS)
def test_any_value_in_any_place_of_annotations_gives_a_sentence_or_an_item(kind, key, tmp_path):
    root = tmp_path / "data"
    (root / "annotations").mkdir(parents=True)
    good_image(root / "val" / "a.jpg", (30, 20))
    for value in [*hostile.hostile_values(Random(0)), "missing"]:
        content = copy.deepcopy(hostile.coco_content())
        if key is None:
            content[kind][0] = value
        elif value == "missing":
            del content[kind][0][key]
        else:
            content[kind][0][key] = value
        (root / "annotations" / "instances_val.json").write_text(json.dumps(content))
        source = refused(lambda: Coco(str(root), long_side=64, short_side=32, max_bad_annotations=9, num_workers=0))
        if source is None:
            continue
        assert all(map(is_sentence, source.annotations("val").complaints))
        read_all(source.val_set())
        for record in source.annotations("val").of_image(0):
            assert 0 <= record["label"] < source.num_classes


def test_any_name_of_files_and_classes_is_read(tmp_path):
    names = [name.format("png") for name in hostile.ODD_NAMES]
    for name in names:
        good_image(tmp_path / "data" / name.removesuffix(".png") / "a.png")
        good_image(tmp_path / "data" / "a b" / name)
    for name in hostile.HIDDEN_NAMES:
        path = tmp_path / "data" / "a b" / name.format("png")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"hidden")
    source = ImageFolder(str(tmp_path / "data"), held_out=0.5, **OPTIONS)
    assert source.num_classes == len(names)
    assert source.digest()
    assert read_all(source.train_set(), source.val_set()) == (2 * len(names), [])


def test_an_image_is_turned_as_its_exif_data_say(tmp_path):
    upright = Image.linear_gradient("L").resize((48, 32))
    path = tmp_path / "a.jpg"
    path.write_bytes(hostile.rotated(upright))
    with Image.open(path) as stored:
        assert stored.size == (32, 48)
    assert np.abs(np.asarray(open_image(path, 1), int) - np.asarray(upright, int)).max() <= 3
