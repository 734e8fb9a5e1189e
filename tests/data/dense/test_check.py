import os

import pytest

from linvit.data.dense.check import check_dense
from linvit.data.dense.scenes import make_scenes


def test_a_data_set_is_counted_without_a_word(tmp_path, capsys):
    list(make_scenes(tmp_path / "scenes", 3, 2, 64, 5))
    items = {}

    def progress(samples, name, total):
        items[name] = total
        return samples

    checked = check_dense(tmp_path / "scenes", progress=progress)
    assert items == {"instances_train.json": 3, "instances_val.json": 2, "training": 3, "validation": 2}
    assert [split.counts["images"] for split in checked] == [3, 2, 3, 2]
    assert checked[2].counts["classes"] == 11
    assert [split.problems for split in checked] == [[]] * 4
    assert check_dense(str(tmp_path / "scenes" / "segmentation"))[0].name == checked[2].name
    assert capsys.readouterr() == ("", "")


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a known data set"):
        check_dense(tmp_path)
    with pytest.raises(ValueError, match=r"annotation file .*nowhere does not exist"):
        check_dense(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["pipe.json", "annotations/instances_val.json"])
def test_annotations_that_are_a_pipe_are_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "val").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} cannot be read \(it is a pipe, a socket or a device"):
        check_dense(tmp_path if "/" in name else tmp_path / name)
