from pathlib import Path

from linvit.runs.images import find_images


def test_hidden_files_of_a_folder_are_no_inputs(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/c.PNG", "._b.jpg", ".cache/d.jpg", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_images([tmp_path]) == ([(str(tmp_path / name), tmp_path / name) for name in ("a/c.PNG", "b.jpg")], [])
