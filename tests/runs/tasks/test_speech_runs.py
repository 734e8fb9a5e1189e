import csv
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import check_resumes_bit_for_bit, content, curve
from tiny_speech import say, write_an4, write_speech_recipe

from linvit.data.speech import LibriSpeech
from linvit.data.speech.audio import read_audio
from linvit.runs import load_run, train
from linvit.runs.training import train_folder
from linvit.studies.pool import last_measures
from linvit.tasks.transcription import CountedNGram, greedy, spelled, word_edits
from linvit_cli import main

LONGER = {
    "task": {"ema_decay": None},
    "data": {"batch_size": 2},
    "trainer": {"max_epochs": 20, "check_val_every_n_epoch": 20},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_folder(write_speech_recipe(tmp_path_factory.mktemp("speech")))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A causal network that hears the tones right."""
    folder = tmp_path_factory.mktemp("learned")
    return train_folder(write_speech_recipe(folder, model={"causal": True}, **LONGER))


def test_its_loss_falls_and_the_best_checkpoint_is_that_of_the_lowest_error(run):
    rows = curve(run)
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    rates = [float(row["ema_wer"]) for row in rows]
    best = content(run, "best")["global_step"] // 4 - 1
    assert rates[best] == min(rates)


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    recipe = write_speech_recipe(tmp_path, data={"root": str(run.parent / "speech")})
    check_resumes_bit_for_bit(recipe, run, step=6, fewest=20)


@pytest.mark.parametrize(("few", "val"), [(True, False), (True, True), (False, False)])
def test_utterances_that_cannot_be_aligned_are_counted(run, tmp_path, few, val, caplog):
    shutil.copytree(run.parent / "speech", tmp_path / "speech")
    for split in ("train", *["val"] * val):
        listed = tmp_path / "speech" / split / "7" / "3" / "7-3.trans.txt"
        names = [line.split()[0] for line in listed.read_text().splitlines()]
        listed.write_text(
            "".join(f"{name} {'LOW' if few and place > 2 else 'L' * 99}\n" for place, name in enumerate(names))
        )
    recipe = write_speech_recipe(tmp_path, data={"units": "characters"}, trainer={"max_epochs": 2})
    if not few:
        with pytest.raises(
            ValueError, match=r"^16 of the 16 training utterances have too few frames for their tokens: check"
        ):
            train(recipe)
        return
    folder = train_folder(recipe)
    said = "utterances have too few frames for their tokens, so they are left out of the loss."
    assert caplog.text.count(f"3 of the 16 training {said}") == 1
    assert caplog.text.count(f"3 of the 6 held-out {said}") == val
    assert all(float(row["train_loss"]) > 0 and float(row["val_loss"]) > 0 for row in curve(folder))


@pytest.mark.slow
def test_transcripts_without_words_or_tokens_are_told(learned, tmp_path, caplog):
    speech = shutil.copytree(learned.parent / "speech" / "val", tmp_path / "speech")
    (listed,) = speech.rglob("*.trans.txt")
    names = [line.split()[0] for line in listed.read_text().splitlines()]
    listed.write_text("".join(f"{name} LOW low, low,\n" for name in names))
    load_run(learned).evaluate(speech)
    assert "12 words or characters of the transcripts of" in caplog.text
    assert "have no token and count as errors, most often 'low,'." in caplog.text
    listed.write_text("\n".join(names))
    with pytest.raises(ValueError, match=r"The 6 transcripts of .* have no words: check their files"):
        load_run(learned).evaluate(speech)


def test_the_error_rate_is_the_sum_of_edits_over_the_sum_of_words(learned):
    run = load_run(learned)
    measures = run.evaluate()
    network, source = run.network, run.source()
    counted = []
    for features, targets in (source.val_set()[index] for index in range(len(source.val_set()))):
        with torch.no_grad():
            logits, lengths = network(features[None], torch.tensor([len(features)]))
        counted.append(word_edits(targets["text"], spelled(greedy(logits, lengths)[0], run.class_names)))
    edits, words = (sum(column) for column in zip(*counted, strict=True))
    assert measures["wer"] == pytest.approx(edits / words)
    assert measures["utterances"] == 6
    assert measures["wer"] < 0.2


def test_files_of_any_sampling_rate_are_transcribed(learned, tmp_path, capsys):
    sounds = [say(tmp_path / "a.wav", "LOW HIGH MID"), say(tmp_path / "b" / "b.flac", "HIGH LOW", rate=22_050)]
    output = tmp_path / "texts.csv"
    assert main(["predict", str(learned), str(sounds[0]), str(tmp_path / "b"), "--output", str(output)]) == 0
    rows = list(csv.DictReader(output.open()))
    assert [row["text"] for row in rows] == ["LOW HIGH MID", "HIGH LOW"]
    assert main(["predict", str(learned), str(sounds[0]), "--beam", "4"]) == 0
    assert "LOW HIGH MID" in capsys.readouterr().out
    assert main(["predict", str(learned), str(sounds[0]), "--output", str(tmp_path / "texts.json")]) == 0
    assert json.loads((tmp_path / "texts.json").read_text()) == [{"sound": str(sounds[0]), "text": "LOW HIGH MID"}]


def test_what_is_no_sound_is_named_and_the_rest_is_transcribed(learned, tmp_path, capsys):
    good = say(tmp_path / "good.wav", "MID")
    (tmp_path / "bad.wav").write_text("no sound")
    say(tmp_path / "short.wav", "LOW")
    import soundfile

    soundfile.write(tmp_path / "short.wav", [0.0] * 100, 16_000)
    assert main(["predict", str(learned), str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert str(good.name) in said.out.replace("\n", "")
    assert "bad.wav cannot be read as sound" in said.err
    assert "0.006 s (100 samples) long, shorter than one frame" in said.err


def test_another_folder_and_its_report(learned, tmp_path):
    shutil.copytree(learned.parent / "speech" / "train", tmp_path / "other")
    run = load_run(learned)
    measures = run.evaluate(tmp_path / "other")
    assert measures["utterances"] == 16
    page = run.report(tmp_path / "page.html", measures, tmp_path / "other").read_text()
    assert "By speaker" in page
    assert "<th>word error rate</th>" in page


def test_subsets_that_are_evaluated_together_are_named(learned, caplog):
    assert load_run(learned).evaluate(learned.parent / "speech")["utterances"] == 22
    assert "contains the subsets train, val, which are evaluated together" in caplog.text
    assert load_run(learned).evaluate(root=str(learned.parent / "speech"), val=["train"])["utterances"] == 16


def test_the_report_names_each_utterance_beside_one_that_is_left_out(learned, tmp_path):
    speech = shutil.copytree(learned.parent / "speech", tmp_path / "speech")
    (speech / "val" / "7" / "3" / "7-3-0001.wav").write_bytes(b"no sound")
    run = load_run(learned)
    page = run.report(tmp_path / "page.html", root=str(speech), val=("val",), max_corrupt=1).read_text()
    assert "7-3-0005.wav" in page
    assert "7-3-0001.wav" not in page


def test_the_report_on_a_subset_seen_from_within_and_on_a_data_set_of_the_hub(learned, tmp_path, monkeypatch):
    monkeypatch.chdir(learned.parent / "speech" / "val" / "7" / "3")
    assert "By speaker" in load_run(learned).report(tmp_path / "page.html", data=".").read_text()
    assert [LibriSpeech.speaker(Path(name)) for name in ("a.wav", "train/3", "7/3/7-3-0001.wav")] == ["–", "train", "7"]


def test_a_run_decodes_as_its_recipe_says_unless_told_otherwise(run, tmp_path):
    groups = {"data": {"root": str(run.parent / "speech")}, "trainer": {"max_epochs": 1}, "task": {"beam": 3}}
    trained = train(write_speech_recipe(tmp_path, **groups))
    assert trained.task.beam == 3
    sound = say(tmp_path / "a.wav", "MID")
    trained.predict(sound, beam=2, word_bonus=1.5)
    assert (trained.task.beam, trained.task.decoding["bonus"]) == (2, 1.5)
    trained.predict(sound)
    assert (trained.task.beam, trained.task.decoding["bonus"]) == (3, 0.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lm_weight": 2.0}, "`lm_weight` is the weight of `language_model`, which is not given"),
        ({"word_bonus": 1.0}, "`word_bonus` needs a beam"),
        ({"beam": 0}, "`beam` is 0"),
    ],
)
def test_options_of_decoding_are_never_ignored(learned, options, sentence):
    run = load_run(learned)
    for ask in (run.evaluate, lambda **given: run.predict(["a.wav"], **given), run.report):
        with pytest.raises(ValueError, match=sentence):
            ask(**options)


def test_samples_in_memory_are_transcribed_as_a_file(learned, tmp_path):
    sound = say(tmp_path / "a.wav", "LOW HIGH")
    samples = read_audio(sound, 16_000)
    run = load_run(learned)
    transcripts = run.predict([sound, samples, samples.double().numpy(), samples[:100]])
    assert [row.text for row in transcripts] == ["LOW HIGH"] * 3
    assert [row.file for row in transcripts] == [str(sound), "sound 2", "sound 3"]
    assert transcripts.unreadable == ("The sound 4 has 100 samples, less than one frame: leave it out.",)
    with pytest.raises(ValueError, match="expected floats"):
        run.predict([samples[None]])
    broken = run.predict([samples, samples / 0])
    assert len(broken) == 1
    assert broken.unreadable == (
        "The sound 2 has the sample nan, expected finite numbers in −1 … 1: scale or repair it.",
    )


@pytest.mark.parametrize("units", ["characters", "subwords"])
def test_other_tokens_are_learned_and_loaded(run, units, tmp_path):
    data = {"root": str(run.parent / "speech"), "units": units, "num_tokens": 14, "groups": 2}
    trained = train(write_speech_recipe(tmp_path, data=data, trainer={"max_epochs": 1}))
    assert trained.evaluate()["utterances"] == 6
    assert (trained.preprocessing.tokenizer != "") == (units == "subwords")
    transcripts = trained.predict(run.parent / "speech" / "val")
    assert len(transcripts) == 6
    assert not transcripts.unreadable


@pytest.mark.slow
def test_a_transducer_learns_and_writes(run, tmp_path):
    data = {"root": str(run.parent / "speech"), "val": ["train"], "batch_size": 2}
    model = {"head": "transducer", "predictor_width": 16}
    folder = train_folder(write_speech_recipe(tmp_path, model=model, **LONGER | {"data": data}))
    assert float(curve(folder)[-1]["wer"]) < 0.3
    trained = load_run(folder)
    assert len(trained.predict(run.parent / "speech" / "val")) == 6
    with pytest.raises(ValueError, match="a transducer is decoded greedily"):
        trained.predict(run.parent / "speech" / "val", beam=2)
    with pytest.raises(ValueError, match="needs complete utterances"):
        trained.transcriber()


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


def test_a_language_model_is_counted_in_the_training_transcripts(learned, tmp_path, capsys):
    sound = say(tmp_path / "a.wav", "MID")
    asked = ["predict", str(learned), str(sound), "--beam", "8", "--lm", "train"]
    assert main([*asked, "--lm-weight", "0"]) == 0
    assert "MID" in capsys.readouterr().out
    assert main([*asked, "--lm-weight", "99"]) == 0  # no word is worth it
    assert "MID" not in capsys.readouterr().out
    run = load_run(learned)
    run.evaluate(beam=2, language_model="train")
    counted = CountedNGram(one.text for one in run.source().utterances("train"))
    for word in ("LOW", "MID", "HIGH"):
        assert run.task.decoding["language_model"](("LOW",), word) == counted(("LOW",), word)


def test_a_second_decoding_with_the_language_model_is_measured_while_training(run, tmp_path):
    groups = {"data": {"root": str(run.parent / "speech")}, "trainer": {"max_epochs": 1}}
    trained = train(write_speech_recipe(tmp_path, **groups, task={"ema_decay": None, "lm_beam": 3}))
    measured = last_measures(trained.folder)
    assert measured["wer"] == trained.evaluate()["wer"]
    assert measured["wer_lm"] == trained.evaluate(beam=3, language_model="train")["wer"]
    assert measured["wer_lm"] != measured["wer"]


def test_an_an4_folder_is_evaluated_by_speaker(learned, tmp_path):
    write_an4(tmp_path / "an4", {"fash": ["LOW HIGH"], "mgah": ["MID"]}, {"fcaw": ["HIGH", "LOW MID"], "miry": ["LOW"]})
    run = load_run(learned)
    assert run.evaluate(**{"name": "an4", "root": str(tmp_path / "an4")})["utterances"] == 3
    page = run.report(tmp_path / "page.html", name="an4", root=str(tmp_path / "an4")).read_text()
    assert "fcaw" in page
    assert "miry" in page
    assert len(run.predict(tmp_path / "an4" / "wav" / "an4_clstk")) == 2


@pytest.mark.parametrize("seconds", ["0.013", "0.2", "9"])
def test_the_text_of_pieces_is_that_of_the_whole(learned, seconds, tmp_path, capsys):
    sound = say(tmp_path / "a.wav", "LOW LOW HIGH MID HIGH")
    text = load_run(learned).predict(sound)[0].text
    assert main(["predict", str(learned), str(sound), "--pieces", seconds]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    if seconds == "0.2":
        transcriber = load_run(learned).transcriber()
        pieces = read_audio(sound, 16_000).split(3200)
        texts = [transcriber.add(piece, last=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
        assert texts[-1] == text
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert len(set(texts)) > 3
        assert "".join(load_run(learned).stream([sound], 0.2)) == text
        for wrong in (pieces[0][None], (pieces[0] * 2**15).short(), pieces[0] / 0):
            with pytest.raises(ValueError, match="The piece"):
                transcriber.add(wrong)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strips"], "--strips is not an option of predict for the task speech"),
        (["--pieces", "0"], "is 0.0, expected a time above 0"),
        (["--pieces", "1", "--beam", "2"], "--beam is not an option of stream for the task speech, which accepts"),
        (["another.wav", "--pieces", "1"], "One file can be streamed at a time, but 2 are given"),
        ([".", "--pieces", "1"], "One file can be streamed at a time, but 3 are given"),
    ],
)
def test_wrong_streams_end_in_a_sentence(learned, more, message, tmp_path, capsys, monkeypatch):
    sound = say(tmp_path / "a.wav", "LOW")
    say(tmp_path / "b.wav", "LOW")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(learned), str(sound), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_network_that_needs_the_whole_says_so(run, tmp_path, capsys):
    sound = say(tmp_path / "a.wav", "LOW")
    assert main(["predict", str(run), str(sound), "--pieces", "1"]) == 2
    assert "needs complete utterances: to transcribe a stream, train with model.causal=true" in capsys.readouterr().err
