import shutil

import pytest
import torch
from imagenet_folder import CLASSES, fill, write_imagenet, write_shards, write_tars

from linvit.data.images import ImageFolder, TimmImages
from linvit.errors import SettingError

OPTIONS = {"size": 32, "batch_size": 4, "num_workers": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("data") / "imagenet")


@pytest.fixture(scope="module")
def tars(root, tmp_path_factory):
    return write_tars(root, tmp_path_factory.mktemp("tars"))


@pytest.fixture(scope="module")
def shards(root, tmp_path_factory):
    pytest.importorskip("webdataset", reason="timm reads WebDataset shards with the package webdataset")
    return write_shards(root, tmp_path_factory.mktemp("shards"))


def streamed(shards, **options):
    more = {"train_split": "train", "val_split": "val", "num_labels": 3}
    return TimmImages(str(shards), "wds/pictures", **OPTIONS | more | options)


def read(loader):
    images, targets = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(targets)


def assert_reads_as_the_folder(data, root, loaders=("val_dataloader", "train_dataloader")):
    folder = ImageFolder(str(root), **OPTIONS)
    assert data.class_names == folder.class_names == list(CLASSES)
    for loader in loaders:
        assert all(map(torch.equal, read(getattr(data, loader)()), read(getattr(folder, loader)())))


def test_a_folder_reads_as_imagefolder_does(root):
    assert_reads_as_the_folder(TimmImages(str(root), **OPTIONS), root)


def test_hidden_files_and_folders_are_not_read(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "copy")
    image = next(path for path in root.rglob("*.*") if path.is_file())
    for split in ("train", "val"):
        for name in (f"{CLASSES[0]}/._x.png", f"{CLASSES[0]}/.ipynb_checkpoints/x.png", ".trash/x.png"):
            (copy / split / name).parent.mkdir(exist_ok=True)
            shutil.copy(image, copy / split / name)
    assert_reads_as_the_folder(TimmImages(str(copy), **OPTIONS), root, ["val_dataloader"])


@pytest.mark.parametrize(("link", "target"), [("train/self", "."), (f"val/{CLASSES[1]}/x", "../../train")])
def test_links_that_lead_round_in_circles_are_named(root, tmp_path, link, target):
    copy = shutil.copytree(root, tmp_path / "copy")
    (copy / link).symlink_to(target)
    (copy / "train" / CLASSES[1] / "back").symlink_to("../../val")
    with pytest.raises(ValueError, match="is a link to a folder that contains it: remove the link"):
        TimmImages(str(copy), **OPTIONS)


def test_a_tar_file_reads_as_its_folder_does(root, tars):
    data = TimmImages(str(tars / "train.tar"), val_root=str(tars / "val.tar"), **OPTIONS)
    assert_reads_as_the_folder(data, root)


def test_indexed_readers_resume_in_the_middle_of_an_epoch(tars):
    data = TimmImages(str(tars / "train.tar"), val_root=str(tars / "val.tar"), repeats=3, **OPTIONS)
    images, _ = read(data.train_dataloader())
    data.load_state_dict({"reached": (0, 1)})
    assert torch.equal(read(data.train_dataloader())[0], images[4:])


def test_one_tar_file_is_not_both_parts(tars):
    with pytest.raises(ValueError, match=r"has the training images: set `val_root`"):
        TimmImages(str(tars / "train.tar"), **OPTIONS).val_dataloader()


def test_classes_of_the_validation_images_follow_the_training(root, tmp_path):
    for part, names in (("train", ("ant", "bee", "cat")), ("val", ("bee", "cat"))):
        for name in names:
            fill(tmp_path / part / name, 1)
    assert read(TimmImages(str(tmp_path), **OPTIONS).val_dataloader())[1].tolist() == [1, 2]
    fill(tmp_path / "val" / "dog", 1)
    with pytest.raises(ValueError, match="'dog', but the 3 classes known here are ant, bee, cat"):
        TimmImages(str(tmp_path), **OPTIONS).val_dataloader()


def test_folders_named_by_numbers_are_class_indices(tmp_path):
    for name in range(12):
        fill(tmp_path / "val" / str(name), 1)
    data = TimmImages(str(tmp_path), **OPTIONS)
    assert read(data.val_dataloader())[1].tolist() == list(range(12))


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_stream_validates_every_image_once(shards, root, workers):
    images, targets = read(streamed(shards, num_workers=workers).val_dataloader())
    theirs, labels = read(ImageFolder(str(root), **OPTIONS).val_dataloader())
    assert sorted(zip(images.sum((1, 2, 3)).tolist(), targets.tolist(), strict=True)) == sorted(
        zip(theirs.sum((1, 2, 3)).tolist(), labels.tolist(), strict=True)
    )


def test_a_stream_trains_for_its_length(shards):
    loader = streamed(shards).train_dataloader()
    assert len(loader) == 3
    assert read(loader)[0].shape == (12, 3, 32, 32)


def test_classes_that_a_class_map_has_not_are_named(shards, tmp_path):
    (tmp_path / "names.txt").write_text("".join(f"{name}\n" for name in CLASSES))  # the shards have numbers
    source = streamed(shards, class_map=str(tmp_path / "names.txt"))
    with pytest.raises(SettingError, match=r"images of the class \d, which is missing from `class_map`: add it"):
        read(source.val_dataloader())


def test_a_stream_says_what_it_cannot_promise(shards, monkeypatch, caplog):
    with pytest.raises(ValueError, match=r"`repeats` is 3, but the reader wds/pictures is a stream"):
        streamed(shards, repeats=3)
    streamed(shards).load_state_dict({"reached": (0, 1)})
    assert "the run resumes, but not bit for bit" in caplog.text
    monkeypatch.setattr("linvit.data.images.readers.replica", lambda: (0, 2))
    with pytest.raises(ValueError, match="validate in one process"):
        streamed(shards).val_dataloader()
    with pytest.raises(ValueError, match=r"knows no class names: set `num_labels`"):
        streamed(shards, num_labels=None)


def test_a_hugging_face_data_set(root, tmp_path):
    pytest.importorskip("datasets", reason="timm reads Hugging Face data sets with the package datasets")
    assert_reads_as_the_folder(TimmImages(str(tmp_path), f"hfds/{root}", **OPTIONS), root, ["val_dataloader"])
