"""VOC, YOLO, masks and maps of objects: the same objects in every format give the same targets as COCO's."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from dense_formats import (
    EVERY,
    IMAGES,
    mask_of,
    write_array,
    write_id_maps,
    write_image,
    write_masks,
    write_voc,
    write_yolo,
    xml,
)
from PIL import Image

from linvit.data.dense import InstanceMasks, Voc, Yolo
from linvit.data.dense.instance_masks import read_values

SIDES, BOX = ("width", "height"), (0.4, 0.3, 0.6, 0.7)
SIZES = {"long_side": 64, "short_side": 64, "num_workers": 0, "flip": 0.0}


def reader(kind):
    return lambda root, **options: kind(str(root), **SIZES | options)


voc, yolo, masks = map(reader, (Voc, Yolo, InstanceMasks))
WRITTEN = {
    "voc": (write_voc, voc),
    "yolo boxes": (write_yolo, partial(yolo, needs_masks=False)),
    "yolo polygons": (partial(write_yolo, polygons=True), yolo),
    "yolo in train/images": (partial(write_yolo, shape="{}/images", polygons=True), yolo),
    "yolo next to the images": (partial(write_yolo, shape="{}", polygons=True), yolo),
    "masks": (write_masks, masks),
    "maps": (write_id_maps, masks),
    "maps without ending": (partial(write_id_maps, images="images", maps="masks", ending=""), masks),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_targets_are_the_objects(tmp_path, written, split):
    write, read = WRITTEN[written]
    source = read(write(tmp_path / "data"))
    contents = source.contents(split)
    assert len(contents) == len(IMAGES[split])
    for (image, target), (name, (size, objects)) in zip(
        (contents.items[index] for index in range(len(contents))), IMAGES[split].items(), strict=True
    ):
        assert tuple(image.shape[-2:]) == target["original_size"] == size
        order = target["boxes"][:, 0].argsort().tolist()
        expected = sorted(objects, key=lambda item: item[1])
        torch.testing.assert_close(
            target["boxes"].as_subclass(torch.Tensor)[order],
            torch.tensor([box for _, *box in expected], dtype=torch.float32),
        )
        areas = [(right - left) * (bottom - top) for _, left, top, right, bottom in expected]
        assert target["area"][order].tolist() == pytest.approx(areas, rel=1e-5)
        classes = [0 if isinstance(source, InstanceMasks) else label for label, *_ in expected]
        assert target["labels"][order].tolist() == classes, name
        if source.needs_masks:
            truth = np.stack([mask_of(size, box) > 0 for _, *box in expected])
            assert np.array_equal(target["masks"][order].numpy() > 0, truth)


def undivided(kind, root):
    if kind == "voc":
        return voc, write_voc(root, lists=False)
    return (yolo, write_yolo(root, "images", polygons=True)) if kind == "yolo" else (masks, write_masks(root, False))


@pytest.mark.parametrize("kind", ["voc", "yolo", "masks"])
def test_a_share_is_held_out_by_name_if_the_data_name_no_splits(tmp_path, kind):
    read, root = undivided(kind, tmp_path / "data")

    def names(name, **options):
        known = read(root, **options).annotations(name)
        return {image["file_name"].rpartition("/")[2][0] for image in known.images}

    train, val = names("train"), names("val")
    assert len(val) == 1
    assert train | val == set(EVERY)
    assert not train & val
    assert len({*names("val", split=1), *names("val", split=2), *names("val", split=3)}) > 1
    assert names("val", held_out=1.0) == set(EVERY)
    with pytest.raises(ValueError, match="5 images with annotations, but none of them is held out: set `held_out`"):
        read(root, held_out=0.0)


def test_difficult_objects_are_evaluated_as_crowds_and_not_trained_on(tmp_path):
    root = write_voc(tmp_path / "data")
    for name in ("a", "e"):
        (root / "Annotations" / f"{name}.xml").write_text(xml(*EVERY[name], difficult=(0,)))
    source = voc(root, batch_size=3)
    (_, targets), *_ = source.train_dataloader()
    assert sorted(len(target["labels"]) for target in targets) == [1, 1, 2]
    assert [target["iscrowd"].tolist() for _, target in map(source.val_set().__getitem__, (0, 1))] == [[0], [1, 0]]
    assert [entry["iscrowd"] for entry in source.ground_truth()["annotations"]] == [0, 1, 0]


def test_numbers_of_voc_may_have_exponents(tmp_path):
    root = write_voc(tmp_path / "data")
    path, expected = root / "Annotations/d.xml", voc(root).annotations("val").of_image(0)
    assert "<xmin>6<" in path.read_text()
    path.write_text(path.read_text().replace("<xmin>6<", "<xmin>0.6E+1<"))
    assert voc(root).annotations("val").of_image(0) == expected


def test_other_lists_of_voc_can_be_named(tmp_path):
    root = write_voc(tmp_path / "data")
    (root / "ImageSets/Main/trainval.txt").write_text("a\nb\nc\nd\ne\n")
    (root / "ImageSets/Main/test.txt").write_text("b\n")
    assert Voc.found_in(root) == {"name": "voc", "root": str(root)}
    (root / "ImageSets/Main/val.txt").rename(root / "ImageSets/Main/other.txt")
    assert Voc.found_in(root) == {"name": "voc", "root": str(root), "val": "test"}
    (root / "ImageSets/Main/other.txt").rename(root / "ImageSets/Main/val.txt")
    source = voc(root, train="trainval", val="test")
    assert (len(source.train_set()), len(source.val_set())) == (5, 1)
    with pytest.raises(
        ValueError, match=r"Main/none\.txt does not exist: set `val` to one of test, train, trainval, val"
    ):
        voc(root, val="none")
    (root / "ImageSets/Main/test.txt").write_text("../../b\n")
    with pytest.raises(ValueError, match=r"test\.txt has the name '\.\./\.\./b', expected that of an image"):
        voc(root, val="test")


ENTITIES = b'<!DOCTYPE a [<!ENTITY x "y"><!ENTITY z "&x;&x;&x;">]><annotation><size>&z;</size></annotation>'
XML, TXT, PNG = "Annotations/d.xml", "labels/val/d.txt", "val/e/masks/1.png"
FAULTS = [  # format, file, what is written or replaced in it, and the sentence; an image or an object is left out
    ("voc", XML, b"", r"d\.xml is not a readable XML file \(no element found"),
    ("voc", XML, ENTITIES, r"d\.xml is not a readable XML file \(it has a document type declaration\)"),
    ("voc", XML, ("<xmin>6<", "<xmin>nan<"), r"d\.xml, object 1 has 'nan' as xmin, expected a number of pixels"),
    ("voc", XML, ("<xmin>6<", "<xmin>30<"), r"d\.xml, object 1 has a box of -4×20 px .*smaller than a pixel"),
    ("yolo boxes", TXT, ("1 ", "0 0.5 0.5 0.2\n1 "), r"line 1 has 4 numbers, expected a class and a box \(5\)"),
    ("yolo boxes", TXT, ("1 ", "0 30 20 8 8\n1 "), "line 1 has the box .* outside its image"),
    ("yolo boxes", TXT, ("1 ", "0 .5 .5 .2 .2\n0 .5 .5 .2 .2\n1 "), "line 2 repeats line 1: remove it"),
    ("masks", PNG, b"broken", r"1\.png is not a readable mask"),
    ("masks", PNG, np.ones((40, 50), np.uint8), r"1\.png has (a mask of the size|the box .* outside its image)"),
]


@pytest.mark.parametrize(("written", "file", "change", "says"), FAULTS)
def test_what_cannot_be_used_is_left_out_up_to_the_limit(tmp_path, written, file, change, says):
    write, read = WRITTEN[written]
    path = write(tmp_path / "data") / file
    if isinstance(change, tuple):
        assert change[0] in path.read_text()
        path.write_text(path.read_text().replace(*change, 1))
    elif isinstance(change, bytes):
        path.write_bytes(change)
    else:
        write_array(path, change)
    with pytest.raises(ValueError, match=says):
        read(tmp_path / "data")
    limit = "max_corrupt" if written == "voc" and isinstance(change, bytes) else "max_bad_annotations"
    left = read(tmp_path / "data", **{limit: 1}).annotations("val")
    expected = {"voc": [2] if limit == "max_corrupt" else [0, 2], "masks": [1, 1]}.get(written)
    assert left.num_objects == (expected or ([2, 2] if "repeats" in says else [1, 2]))


def test_an_unknown_class_of_voc_is_named(tmp_path):
    root = write_voc(tmp_path / "data")
    with pytest.raises(ValueError, match=r"e\.xml, object 1 has the unknown class 'cat': correct or remove it"):
        voc(root, class_names=["dog", "bird"])
    known = voc(root, class_names=["dog", "cat", "bird"])
    assert known.class_names == ["dog", "cat", "bird"]
    assert known.contents("val").items[0][1]["labels"].tolist() == [0]


def test_an_image_may_lack_its_size_in_voc_but_not_have_another(tmp_path):
    root = write_voc(tmp_path / "data")
    path = root / "Annotations" / "d.xml"
    path.write_text(path.read_text().replace("<width>64</width>", ""))
    assert voc(root).val_set()[0][1]["original_size"] == (36, 64)
    path.write_text(xml((64, 64), []))
    assert "d.jpg has 36×64 px, but " in voc(root).val_set()[0]
    path.write_text(xml((64, 36), []))
    assert "d.jpg has 36×64 px after its EXIF data turned it, but " in voc(root).val_set()[0]


@pytest.mark.parametrize("shape", [[4, 3], [6, 2]])
def test_of_keypoints_the_boxes_are_read(tmp_path, shape):
    root = write_yolo(tmp_path)
    (root / "data.yaml").write_text(json.dumps({"names": ["cat", "dog"], "kpt_shape": shape}))
    for path in root.glob("labels/*/*.txt"):
        path.write_text("0 .5 .5 .2 .4 .45 .35 2 .55 .35 2 .45 .65 1 0 0 0\n")
    assert Yolo.found_in(root)["needs_masks"] is False
    known = yolo(root, needs_masks=False).annotations("val")
    size = known.images[0]
    assert known.of_image(0)[0]["box"] == pytest.approx([size[k] * v for k, v in zip(2 * SIDES, BOX, strict=True)])
    (root / "data.yaml").write_text(json.dumps({"names": ["cat", "dog"]}))
    with pytest.raises(ValueError, match=r"line 1 has a polygon that leaves 0\.\.1 \(keypoints need `kpt_shape`"):
        yolo(root, needs_masks=False)
    (root / "data.yaml").write_text(json.dumps({"names": ["cat", "dog"], "kpt_shape": [17, 3]}))
    with pytest.raises(ValueError, match=r"line 1 has 17 numbers, expected 56: a class, a box and its keypoints"):
        yolo(root, needs_masks=False)


BOMB = "a: &a [x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [BOMB + "names: *h", "names: !!timestamp x", "names: 2024-99-99", "names: !!int x", "[" * 9999, "1:1" * 9999],
)
def test_yaml_that_cannot_be_used_is_one_sentence(tmp_path, text):
    root = write_yolo(tmp_path)
    (root / "data.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"data\.yaml is not valid YAML \(.{1,100}\): correct it\.$"):
        yolo(root, needs_masks=False)


def test_images_without_labels_have_no_objects_and_labels_without_images_are_named(tmp_path):
    root = write_yolo(tmp_path / "data")
    (root / "labels/val/d.txt").unlink()
    assert yolo(root, needs_masks=False).annotations("val").num_objects == [0, 2]
    (root / "images/val/e.jpg").unlink()
    with pytest.raises(ValueError, match=r"None of the 1 val images of \S+ has a text file"):
        yolo(root, needs_masks=False)
    write_image(root / "images/val/f.jpg", (40, 40))
    (root / "labels/val/f.txt").touch()
    with pytest.raises(ValueError, match=r"labels/val/e\.txt has no image: add it, or remove the file"):
        yolo(root, needs_masks=False)
    (root / "labels/val/e.txt").rename(root / "labels/val/classes.txt")
    assert len(yolo(root, needs_masks=False).val_set()) == 2


def test_classes_of_yolo_are_named_by_a_list_a_mapping_a_file_or_the_recipe(tmp_path):
    root = write_yolo(tmp_path / "data")
    names = root / "data.yaml"
    names.write_text("names:\n  1: dog\n  0: cat\n")
    assert yolo(root, needs_masks=False).class_names == ["cat", "dog"]
    names.write_text("names: {0: cat, 1: dog, 7: 8}")
    assert yolo(root, needs_masks=False).class_names == ["cat", "dog", "8"]
    reordered = yolo(root, needs_masks=False, class_names=["dog", "cat"])
    assert reordered.contents("val").items[0][1]["labels"].tolist() == [0]
    names.unlink()
    (root / "classes.txt").write_text("kitten\npuppy\n")
    assert yolo(root, needs_masks=False).class_names == ["kitten", "puppy"]
    assert yolo(root, needs_masks=False, class_names=["a", "b"]).class_names == ["a", "b"]


def test_photos_that_are_turned_by_their_exif_data_keep_their_boxes(tmp_path):
    root = write_yolo(tmp_path / "data")
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(root / "images/val/d.jpg") as image:
        image.transpose(Image.Transpose.ROTATE_90).save(root / "images/val/d.jpg", exif=exif)
    image, target = yolo(root, needs_masks=False).contents("val").items[0]
    assert tuple(image.shape[-2:]) == target["original_size"] == (36, 64)


def test_masks_may_be_of_several_modes(tmp_path):
    root = write_masks(tmp_path / "data")
    folder = root / "val" / "d" / "masks"
    with Image.open(folder / "0.png") as mask:
        truth = np.asarray(mask) > 0
    for mode in ("1", "L", "RGB", "RGBA", "I;16", "P"):
        Image.fromarray(truth.astype(np.uint8) * 255).convert("L" if mode == "I;16" else mode).convert(mode).save(
            folder / "0.png"
        )
        found = masks(root).contents("val").items[0][1]["masks"]
        assert np.array_equal(found[0].numpy() > 0, truth), mode


def test_a_colour_of_a_map_is_an_object_and_what_is_transparent_is_none(tmp_path):
    values = np.zeros((40, 60, 4), np.uint8)
    colours = np.random.default_rng(0).permutation(np.arange(1, 2**24))[:30]
    for number, colour in enumerate(colours.tolist()):
        values[number, :20] = (*colour.to_bytes(3, "little"), 255)
    values[35:] = (9, 9, 9, 0)
    write_image(tmp_path / "images/a.png", (40, 60))
    write_array(tmp_path / "masks/a.png", values)
    write_image(tmp_path / "images/b.png", (40, 60))
    write_array(tmp_path / "masks/b.jpg", values[..., :3])
    assert set(np.unique(read_values(tmp_path / "masks/a.png", lossless=True)).tolist()) == {0, *colours.tolist()}
    data = masks(tmp_path, held_out=1, max_bad_annotations=1)
    assert data.annotations("val").num_objects == [30, 0]
    assert "JPEG changes the numbers of the objects, expected a PNG" in data.annotations("val").complaints[0]


@pytest.mark.parametrize("kind", ["cut-out", "lossy", "blue"])
def test_a_mask_of_one_object_is_opaque_or_bright(tmp_path, kind):
    size, box = (64, 96), (10, 5, 35, 25)
    mask = mask_of(size, box)
    photo = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    write_image(tmp_path / "a/images/a.png", size)
    image = {"cut-out": np.dstack([photo, mask]), "lossy": mask, "blue": mask[..., None] * np.uint8([0, 0, 1])}[kind]
    write_array(tmp_path / "a/masks" / ("a.jpg" if kind == "lossy" else "a.png"), image)
    (entry,) = masks(tmp_path, held_out=1).annotations("val").of_image(0)
    assert (entry["box"], entry["area"]) == ([*map(float, box)], 500)


def test_masks_have_one_class_which_may_be_named(tmp_path):
    root = write_masks(tmp_path / "data")
    assert masks(root).class_names == ["object"]
    assert masks(root, class_names=["nucleus"]).class_names == ["nucleus"]
    with pytest.raises(ValueError, match="`class_names` has 2 names, expected one"):
        masks(root, class_names=["a", "b"])


@pytest.mark.parametrize("written", ["voc", "yolo boxes", "masks"])
def test_ground_truth_is_what_the_coco_tools_take(tmp_path, written):
    write, read = WRITTEN[written]
    truth = read(write(tmp_path / "data")).ground_truth()
    assert len(truth["images"]) == 2
    assert [entry["id"] for entry in truth["annotations"]] == [1, 2, 3]
    json.dumps(truth)
