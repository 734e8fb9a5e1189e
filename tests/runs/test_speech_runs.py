import csv
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tiny_run import content, curve, differing
from tiny_speech import say, write_speech_recipe

from linvit.cli import main
from linvit.models.conformer import StreamCache
from linvit.runs.evaluate import evaluate
from linvit.runs.report_speech import _speaker, write_report
from linvit.runs.restore import restore, source_for
from linvit.runs.stream import listen
from linvit.runs.training import train
from linvit.runs.transcribe import set_decoding, transcribe
from linvit.studies import compare
from linvit.tasks.checkpoints import RunStoppedError
from linvit.tasks.transcription import greedy, spelled, word_edits

LONGER = {
    "task": {"ema_decay": None},
    "data": {"batch_size": 2},
    "trainer": {"max_epochs": 20, "check_val_every_n_epoch": 20},
}


class PressesCtrlC(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(write_speech_recipe(tmp_path_factory.mktemp("speech")), prints=False)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A causal network that hears the tones right."""
    folder = tmp_path_factory.mktemp("learned")
    return train(write_speech_recipe(folder, model={"causal": True}, **LONGER), prints=False)


def test_its_loss_falls_and_the_best_checkpoint_is_that_of_the_lowest_error(run):
    rows = curve(run)
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    rates = [float(row["ema_wer"]) for row in rows]
    best = content(run, "best")["global_step"] // 4 - 1
    assert rates[best] == min(rates)


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    recipe = write_speech_recipe(tmp_path, data={"root": str(run.parent / "speech")})
    with pytest.raises(RunStoppedError):
        train(recipe, callbacks=[PressesCtrlC()], prints=False)
    assert content(tmp_path / "run")["global_step"] == 7
    train(recipe, resume=True, prints=False)
    assert differing(tmp_path / "run", run, fewest=20) == []
    assert curve(tmp_path / "run") == curve(run)


def test_eval_is_the_sum_of_edits_over_the_sum_of_words_heard_one_by_one(learned):
    restored = restore(learned)
    measured = evaluate(restored, enable_progress_bar=False)["raw"]
    network, source = restored.task.network.eval(), source_for(restored, None)
    counted = []
    for features, targets in (source.val_set()[index] for index in range(len(source.val_set()))):
        with torch.no_grad():
            logits, lengths = network(features[None], torch.tensor([len(features)]))
        counted.append(word_edits(targets["text"], spelled(greedy(logits, lengths)[0], restored.class_names)))
    edits, words = (sum(part) for part in zip(*counted, strict=True))
    assert measured["wer"] == pytest.approx(edits / words)
    assert measured["utterances"] == 6
    assert measured["wer"] < 0.2


def test_predict_writes_what_is_said_at_any_sampling_rate(learned, tmp_path, capsys):
    sounds = [say(tmp_path / "a.wav", "LOW HIGH MID"), say(tmp_path / "b" / "b.flac", "HIGH LOW", rate=22_050)]
    output = tmp_path / "told.csv"
    assert main(["predict", str(learned), str(sounds[0]), str(tmp_path / "b"), "--output", str(output)]) == 0
    rows = list(csv.DictReader(output.open()))
    assert [row["text"] for row in rows] == ["LOW HIGH MID", "HIGH LOW"]
    assert main(["predict", str(learned), str(sounds[0]), "--beam", "4"]) == 0
    assert "LOW HIGH MID" in capsys.readouterr().out
    assert main(["predict", str(learned), str(sounds[0]), "--output", str(tmp_path / "told.json")]) == 0
    assert json.loads((tmp_path / "told.json").read_text()) == [{"sound": str(sounds[0]), "text": "LOW HIGH MID"}]


def test_the_trained_network_hears_a_stream_as_the_whole(learned):
    restored = restore(learned)
    network = restored.task.network.double().eval()
    features = source_for(restored, None).val_set()[0][0].double()[None]
    with torch.no_grad():
        whole, _ = network(features, torch.tensor([features.shape[1]]))
        memory = StreamCache()
        heard = torch.cat([network.read(piece, memory) for piece in features.split(8, 1)], 1)
    assert (heard - whole).abs().max() < 1e-11


def test_what_is_no_sound_is_named_and_the_rest_is_told(learned, tmp_path, capsys):
    good = say(tmp_path / "good.wav", "MID")
    (tmp_path / "bad.wav").write_text("no sound")
    say(tmp_path / "short.wav", "LOW")
    import soundfile

    soundfile.write(tmp_path / "short.wav", [0.0] * 100, 16_000)
    assert main(["predict", str(learned), str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert str(good.name) in said.out.replace("\n", "")
    assert "bad.wav cannot be read as sound" in said.err
    assert "0.006 s long, shorter than one frame" in said.err
    assert main(["predict", str(learned), str(tmp_path / "nowhere.wav"), str(good)]) == 1
    said = capsys.readouterr()
    assert "good.wav" in said.out.replace("\n", "")
    assert "There is no sound file or folder at" in said.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["predict", "RUN", "nowhere.wav"], "There is no sound file or folder at nowhere.wav"),
        (["predict", "RUN", "EMPTY"], "has no sound files in it"),
        (["predict", "RUN", "x.wav", "--topk", "3"], "--topk and --threshold are for images"),
        (["predict", "RUN", "SOUND", "--beam", "0"], "--beam is 0"),
        (["predict", "RUN", "SOUND", "--lm", "a.arpa"], "--lm needs a beam"),
        (["eval", "RUN", "--beam", "0"], "--beam is 0"),
        (["predict", "RUN", "SOUND", "--output", "a.txt"], "unknown ending"),
        (["predict", "RUN", "SOUND", "--output", "FILE/a.csv"], "cannot be written"),
        (["generate", "RUN"], "reads no text"),
        (["eval", "RUN", "--data", "nowhere"], "There is no folder of speech at nowhere"),
        (["eval", "RUN", "--data", "EMPTY"], "holds no transcripts"),
    ],
)
def test_wrong_use_ends_in_a_sentence(run, command, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    places = {"RUN": str(run), "EMPTY": str(tmp_path / "empty"), "SOUND": str(run.parent / "speech" / "val")}
    places["FILE/a.csv"] = str(tmp_path / "file" / "a.csv")
    assert main([places.get(part, part) for part in command]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_eval_of_another_folder_and_its_page(learned, tmp_path, capsys):
    shutil.copytree(learned.parent / "speech" / "train", tmp_path / "other")
    page = tmp_path / "page.html"
    assert main(["eval", str(learned), "--data", str(tmp_path / "other"), "--json", "--report", str(page)]) == 0
    measured = json.loads(capsys.readouterr().out)["raw"]
    assert measured["utterances"] == 16
    assert "By speaker" in page.read_text()


def test_eval_of_several_parts_names_them(learned, capsys):
    assert main(["eval", str(learned), "--data", str(learned.parent / "speech"), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["raw"]["utterances"] == 22
    assert "holds the parts train, val, which are measured together" in said.err


def test_the_page_names_each_utterance_beside_one_that_is_left_out(learned, tmp_path):
    speech = shutil.copytree(learned.parent / "speech", tmp_path / "speech")
    (speech / "val" / "7" / "3" / "7-3-0001.wav").write_bytes(b"no sound")
    restored = restore(learned)
    restored.data |= {"root": str(speech), "max_corrupt": 1}
    write_report(restored, {"raw": {}}, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "7-3-0005.wav" in page
    assert "7-3-0001.wav" not in page


def test_the_page_of_a_part_seen_from_within_and_of_a_data_set_of_the_hub(learned, tmp_path, monkeypatch):
    monkeypatch.chdir(learned.parent / "speech" / "val" / "7" / "3")
    assert main(["eval", str(learned), "--data", ".", "--report", str(tmp_path / "page.html")]) == 0
    assert [_speaker(Path(name)) for name in ("a.wav", "train/3", "7/3/7-3-0001.wav")] == ["–", "train", "7"]


def test_eval_of_a_run_without_data_to_measure_on_says_so(learned):
    restored = restore(learned)
    restored.data |= {"val": []}
    with pytest.raises(ValueError, match="has nothing to measure on: name some with --data"):
        evaluate(restored, enable_progress_bar=False)


def test_eval_decodes_as_the_recipe_says(run, tmp_path):
    groups = {"data": {"root": str(run.parent / "speech")}, "trainer": {"max_epochs": 1}, "task": {"beam": 3}}
    assert restore(train(write_speech_recipe(tmp_path, **groups), prints=False)).task.beam == 3


@pytest.mark.parametrize(
    ("package", "more", "sentence"),
    [
        ("soundfile", [], "pip install 'linvit[train,speech]'"),
        ("kenlm", ["--beam", "2", "--lm", "a.arpa"], "pip install kenlm"),
    ],
)
def test_what_is_not_installed_is_one_sentence(learned, package, more, sentence, tmp_path, capsys, monkeypatch):
    sound = say(tmp_path / "a.wav", "MID")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["predict", str(learned), str(sound), *more]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"model": {"name": "conformer_mini"}}, "did you mean 'conformer_nano'"),
        ({"data": {"units": "phones"}}, "units` is 'phones'"),
        ({"data": {"train": ["nowhere"]}}, "There is no folder of speech"),
        ({"data": {"mels": 20}}, "set mels alike for network and data"),
        ({"task": {"beam": 0}}, "task.beam is 0"),
    ],
)
def test_a_wrong_recipe_ends_in_a_sentence(run, groups, message, tmp_path):
    groups.setdefault("data", {}).setdefault("root", str(run.parent / "speech"))
    with pytest.raises(ValueError, match=message):
        train(write_speech_recipe(tmp_path, **groups), prints=False)


@pytest.mark.parametrize("units", ["characters", "subwords"])
def test_other_pieces_are_learned_and_restored(run, units, tmp_path):
    data = {"root": str(run.parent / "speech"), "units": units, "num_tokens": 14, "groups": 2}
    folder = train(write_speech_recipe(tmp_path, data=data, trainer={"max_epochs": 1}), prints=False)
    restored = restore(folder)
    assert evaluate(restored, enable_progress_bar=False)["raw"]["utterances"] == 6
    assert (restored.preprocessing.tokenizer != "") == (units == "subwords")
    told, complaints = transcribe(restored, [run.parent / "speech" / "val"])
    assert len(told) == 6
    assert not complaints


@pytest.mark.slow
def test_attentions_are_compared_over_seeds(run, tmp_path):
    recipes = []
    for mechanism in ("softmax", "mala"):
        (tmp_path / mechanism).mkdir()
        data = {"root": str(run.parent / "speech")}
        path = write_speech_recipe(tmp_path / mechanism, mechanism, data=data, task={"ema_decay": None})
        recipes.append(path.rename(tmp_path / f"{mechanism}.yaml"))
    text = compare(recipes, tmp_path / "out", seeds=2, overrides=["trainer.max_epochs=1"]).to_markdown()
    assert "word error rate, %" in text
    rows = json.loads((tmp_path / "out" / "compared.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["softmax", "mala"]
    assert rows[1]["differences"]["softmax"]["count"] == 2


def test_a_transducer_learns_and_writes(run, tmp_path):
    data = {"root": str(run.parent / "speech"), "val": ["train"], "batch_size": 2}
    model = {"head": "transducer", "predictor_width": 16}
    folder = train(write_speech_recipe(tmp_path, model=model, **LONGER | {"data": data}), prints=False)
    assert float(curve(folder)[-1]["wer"]) < 0.3
    told, _ = transcribe(restore(folder), [run.parent / "speech" / "val"])
    assert len(told) == 6
    with pytest.raises(ValueError, match="a transducer is decoded greedily"):
        set_decoding(restore(folder), 2)


def test_a_language_model_has_its_say(learned, tmp_path, capsys):
    pytest.importorskip("kenlm", reason="kenlm is not installed")
    model = tmp_path / "loves_low.arpa"
    words = "".join(f"{-0.01 if word == 'LOW' else -30}\t{word}\t0\n" for word in ("LOW", "MID", "HIGH"))
    counts = "\\data\\\nngram 1=6\nngram 2=1\n\n\\1-grams:\n-1\t<unk>\t0\n-99\t<s>\t0\n-1\t</s>\t0\n"
    model.write_text(f"{counts}{words}\n\\2-grams:\n-0.01\tLOW LOW\n\n\\end\\\n")
    sound = say(tmp_path / "a.wav", "MID")
    asked = ["predict", str(learned), str(sound), "--beam", "8", "--lm", str(model)]
    assert main([*asked, "--lm-weight", "0"]) == 0
    assert "MID" in capsys.readouterr().out
    assert main([*asked, "--lm-weight", "9"]) == 0
    assert "MID" not in capsys.readouterr().out
    assert main(["eval", str(learned), "--beam", "4", "--lm", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["raw"]["utterances"] == 6


def test_models_lists_conformers_beside_the_published_size(capsys):
    assert main(["models", "--speech", "--json"]) == 0
    rows = {(row["name"], row["mechanism"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["conformer_small", "softmax"]["transducer"] == 10_340_416
    assert (
        rows["conformer_small", "mala"]["transducer"] == rows["conformer_small", "linear"]["transducer"] == 10_338_112
    )
    assert {row["published"] for (name, _), row in rows.items() if name == "conformer_nano"} == {None}


@pytest.mark.parametrize("seconds", ["0.013", "0.2", "9"])
def test_what_is_heard_in_pieces_is_what_is_heard_at_once(learned, seconds, tmp_path, capsys):
    sound = say(tmp_path / "a.wav", "LOW LOW HIGH MID HIGH")
    [(_, text)], _ = transcribe(restore(learned), [sound])
    assert main(["predict", str(learned), str(sound), "--stream", seconds]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    if seconds == "0.2":
        told = list(listen(restore(learned), sound, 0.2))
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(told))
        assert len(set(told)) > 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--stream", "0"], "--stream is 0.0"),
        (["--stream", "inf"], "--stream is inf"),
        (["--stream", "1", "--beam", "2"], "leave --beam and --output out"),
        (["another.wav", "--stream", "1"], "--stream hears one sound file"),
    ],
)
def test_wrong_streams_end_in_a_sentence(learned, more, message, tmp_path, capsys):
    sound = say(tmp_path / "a.wav", "LOW")
    assert main(["predict", str(learned), str(sound), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_network_that_needs_the_whole_says_so(run, tmp_path, capsys):
    sound = say(tmp_path / "a.wav", "LOW")
    assert main(["predict", str(run), str(sound), "--stream", "1"]) == 2
    assert "hears whole utterances: only a network trained with model.causal=true" in capsys.readouterr().err
