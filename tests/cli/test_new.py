from images_by_class import write_classes

from linvit_cli import main


def test_new_says_what_it_wrote_and_how_to_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "photos", {"ant": 5, "bee": 5}, size=(32, 32))
    assert main(["new", "my own.yaml", "--model", "ravlt_nano", "--data", "photos"]) == 0
    shown = capsys.readouterr().out
    assert "my own.yaml: 2 classes, 8 images to train on, 2 held out; 32×32 px, 2 images per batch; 20 epochs" in shown
    assert "20 epochs from ravlt_nano.cifar10; an epoch takes about " in shown
    assert "linvit train 'my own.yaml'" in shown


def test_the_sentence_names_the_flag(tmp_path, capsys):
    assert main(["new", str(tmp_path / "my.yaml"), "--model", "ravlt_nano", "--data", str(tmp_path / "no")]) == 2
    assert "no does not exist: set --data to a folder" in capsys.readouterr().err
