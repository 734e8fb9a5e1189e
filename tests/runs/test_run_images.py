from pathlib import Path

from PIL import Image

from linvit.runs.images import find_images, read_image


def test_files_that_are_not_read_are_counted_and_pages_are_said_once_for_a_list(tmp_path: Path, caplog) -> None:
    names = ("a.gif", "b.tif", "c.avif", "d.jp2", "e.jfif", "f.TGA")
    for name in names:
        image = Image.new("RGB", (40, 30))
        more = {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "red")]} if name < "c" else {}
        image.save(tmp_path / name, **more)
    for name in ("film.mp4", "scan.dcm", "other.dcm", ".hidden.dcm", "none"):
        (tmp_path / name).touch()
    for times in (1, 2):
        items, missing = find_images([tmp_path])
        assert ([path.name for _, path in items], missing) == (list(names), [])
        assert all(read_image(path, name).getpixel((0, 0)) == (0, 0, 0) for name, path in items)
        assert caplog.text.count(f"Not read as images in {tmp_path}, because of their endings: 2 .dcm, 1 ") == times
        assert caplog.text.count("only the first is read") == times


def test_hidden_files_of_a_folder_are_no_inputs(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/c.PNG", "._b.jpg", ".cache/d.jpg", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_images([tmp_path]) == ([(str(tmp_path / name), tmp_path / name) for name in ("a/c.PNG", "b.jpg")], [])
