"""Decoders and Conformers in exported files: the states, and the files as runs."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from tiny_language import write_language_recipe
from tiny_run import ONE_STEP
from tiny_speech import write_speech_recipe
from trained import trained_run

import linvit
from linvit.deploy.facts import KEY, FactsError, facts_in
from linvit.deploy.formats import opened
from linvit.deploy.graph import running_maximum
from linvit.deploy.sequences import cache_of, state_shapes, states_in, zeros
from linvit.models.conformer import Conformer
from linvit.models.sequence import Decoder
from linvit.runs import load_run
from linvit.runs.stored import _run_of_sequences
from linvit_cli import main

ONCE = {"model": {"depth": 1}, "trainer": ONE_STEP}


def decoder(mechanism, **options):
    torch.manual_seed(0)
    return Decoder(257, 16, 1, 2, 24, mechanism=mechanism, **options).eval()


def conformer(mechanism="mala", **options):
    torch.manual_seed(0)
    return Conformer(5, 16, 16, 1, 2, 3, mechanism=mechanism, **options).eval()


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return load_run(trained_run(tmp_path_factory, write_language_recipe, mechanism="rala", **ONCE))


@pytest.fixture(scope="module")
def decoder_file(language, tmp_path_factory):
    return language.export(tmp_path_factory.mktemp("files") / "decoder.onnx")


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return load_run(trained_run(tmp_path_factory, write_speech_recipe, **ONCE))


@pytest.fixture(scope="module")
def conformer_file(speech, tmp_path_factory):
    return speech.export(tmp_path_factory.mktemp("files") / "conformer.onnx")


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("mechanism", ["linear", "mala", "rala", "softmax"])
def test_states_are_zeros_at_the_start_and_names_of_a_cache(mechanism, rope):
    network, tokens = decoder(mechanism, lepe=3, rope=rope), torch.arange(40).view(2, 20)
    begun = cache_of(zeros(state_shapes(network), 2))
    with torch.no_grad():
        read = [network.read(piece, begun) for piece in tokens.split(7, dim=1)]
        assert (torch.cat(read, 1) - network(tokens)).abs().max() < 1e-5
    after = states_in(begun)
    assert list(after) == list(state_shapes(network))
    fixed = mechanism != "softmax"
    assert {name: list(state[:1].shape) for name, state in after.items()} == state_shapes(network) or not fixed


def test_a_state_of_zeros_holds_for_weights_below_one():
    """Exponents may be far below 0, where a shift of 0 would leave no weight."""
    network = decoder("rala")
    shapes = state_shapes(network)
    assert float(cache_of(zeros(shapes, 1)).layers[0].read.shift.max()) == torch.finfo(torch.float32).min


def test_running_maximum_is_cummax():
    x = torch.randn(2, 9, 5)
    for dim in (1, -1):
        values, places = running_maximum(x, dim)
        assert torch.equal(values, x.cummax(dim).values)
        assert torch.equal(x.gather(dim, places), values)


@pytest.mark.slow
def test_a_decoder_is_decoded_by_onnxruntime_alone(language, decoder_file):
    assert decoder_file.difference < 1e-5 * decoder_file.largest
    session = onnxruntime.InferenceSession(decoder_file.path)
    facts = json.loads(session.get_modelmeta().custom_metadata_map[KEY])
    states = {name: np.zeros(shape, np.float32) for name, shape in facts["states"].items()}
    tokens = np.array([[facts["preprocessing"]["separator_token"], *b"The number"]])
    row = tokens
    for _ in range(20):
        logits, *after = session.run(None, {"tokens": tokens, **states})
        states = dict(zip(states, after, strict=True))
        tokens = logits[:, -1:].argmax(-1)
        row = np.concatenate((row, tokens), axis=1)
    with torch.no_grad():
        expected = language.network(torch.from_numpy(row))
    torch.testing.assert_close(torch.from_numpy(logits[:, -1]), expected[:, -2], atol=1e-5, rtol=1e-4)
    assert facts["mechanism"] == "rala"
    assert facts["logits"] == 257


def test_a_decoder_file_generates_and_evaluates_as_its_run(language, decoder_file, tmp_path, capsys):
    loaded = load_run(decoder_file.path)
    assert loaded.preprocessing == language.preprocessing
    asked = {"prompt": "The number ", "tokens": 12, "seed": 3}
    assert "".join(loaded.generate(**asked)) == "".join(language.generate(**asked))
    root = language.recipe["data"]["root"]
    got, expected = (run.evaluate(root, trainer={"accelerator": "cpu"}) for run in (loaded, language))
    assert got.by_weights["raw"]["bits_per_byte"] == pytest.approx(
        expected.by_weights["ema"]["bits_per_byte"], rel=1e-5
    )
    page = loaded.report(tmp_path / "page.html", got, root)
    assert "Bits per token by position" in page.read_text()
    assert main(["generate", str(decoder_file.path), "--tokens", "2"]) == 0
    assert capsys.readouterr().out
    with pytest.raises(ValueError, match="is an exported file: export the run"):
        linvit.export(loaded, "again.onnx")


@pytest.mark.slow
def test_a_conformer_file_transcribes_as_its_run(speech, conformer_file, tmp_path):
    assert conformer_file.difference < 1e-5 * conformer_file.largest
    loaded = load_run(conformer_file.path)
    assert loaded.preprocessing == speech.preprocessing
    root = speech.recipe["data"]["root"]
    files = sorted((speech.path.parent.parent.parent / "speech").rglob("*.wav"))[:2]
    assert files
    assert list(loaded.predict(files)) == list(speech.predict(files))
    got, expected = (run.evaluate(root, trainer={"accelerator": "cpu"}) for run in (loaded, speech))
    assert got.by_weights["raw"]["loss"] == pytest.approx(expected.by_weights["ema"]["loss"], rel=1e-5)
    facts, session = opened(conformer_file.path)
    features = torch.randn(2, 2, 16)
    with torch.no_grad():
        torch.testing.assert_close(session(features)[0], speech.network(features)[0], atol=1e-5, rtol=1e-4)
    assert facts.preprocessing["rate"] == speech.preprocessing.rate
    with pytest.raises(ValueError, match="is an exported file, which needs complete utterances"):
        loaded.transcriber()


@pytest.mark.slow
def test_a_file_of_one_token_at_a_time(tmp_path):
    exported = linvit.export(decoder("mala"), tmp_path / "step.onnx", dynamic=False)
    assert exported.difference < 1e-5 * exported.largest
    assert not exported.facts.dynamic
    with pytest.raises(ValueError, match="does not say how its tokens are made"):
        load_run(exported.path)


@pytest.mark.slow
def test_sequences_of_a_batch_rotate_from_their_own_positions(tmp_path):
    network = decoder("rala", rope=True)
    facts, session = opened(linvit.export(network, tmp_path / "decoder.onnx").path)
    rows = torch.arange(60).view(2, 30)

    def after(row, tokens):
        return session(row[None, :tokens], *zeros(facts.states, 1).values())[1:]

    states = map(torch.cat, zip(after(rows[0], 5), after(rows[1], 17), strict=True))
    logits = session(torch.stack((rows[0, 5:9], rows[1, 17:21])), *states)[0]
    with torch.no_grad():
        expected = torch.stack((network(rows[:1])[0, 5:9], network(rows[1:])[0, 17:21]))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("network", "suffix", "options", "message"),
    [
        (lambda: decoder("softmax"), ".onnx", {"dynamic": False}, "cache of softmax attention grows"),
        (lambda: conformer(head="transducer"), ".onnx", {}, "transducer cannot be exported"),
        (conformer, ".onnx", {"dynamic": False}, "any number of frames"),
        (conformer, ".onnx", {"size": 32}, "`size` is for networks of images"),
        (lambda: decoder("mala"), ".pte", {}, "ExecuTorch files of decoders and Conformers cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, network, suffix, options, message):
    monkeypatch.setattr("linvit.deploy.formats.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=message):
        linvit.export(network(), tmp_path / f"network{suffix}", **options)
    assert not list(tmp_path.iterdir())


def test_damaged_facts_are_refused(decoder_file):
    text = decoder_file.facts.to_json()
    assert facts_in(text, "file").to_json() == text
    with pytest.raises(FactsError, match="is damaged"):
        facts_in(json.dumps({**json.loads(text), "logits": 0}), "file")


@pytest.mark.parametrize(
    "wrong",
    [
        {"states": {"layer0.T": [1, 2]}},
        {"states": {"layer0.conv": [1, -2]}},
        {"preprocessing": {"tokenizer": "bytes", "separator": None, "context": ["x"], "corpus": ""}},
        {"class_names": ["a"]},
    ],
)
def test_damaged_states_are_refused(language, decoder_file, wrong):
    text = json.dumps({**json.loads(decoder_file.facts.to_json()), **wrong})
    with pytest.raises(FactsError, match=r"decoder\.onnx says about .* is damaged"):
        _run_of_sequences(decoder_file.path, facts_in(text, decoder_file.path), lambda *inputs: inputs)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
@pytest.mark.parametrize("mechanism", ["linear", "mala", "rala", "softmax"])
def test_every_mechanism_and_format(tmp_path, mechanism, suffix):
    decoders = (decoder(mechanism, lepe=3, conv=1), decoder(mechanism, rope=True))
    for network in (*decoders, conformer(mechanism), conformer(mechanism, causal=True)):
        exported = linvit.export(network, tmp_path / f"network{suffix}")
        assert exported.difference < 1e-5 * exported.largest
        opened(exported.path)
