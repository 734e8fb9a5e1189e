import math

import numpy as np
import pytest
import soundfile
import torch

from linvit.data.speech import audio
from linvit.data.speech.audio import (
    FLOOR,
    CorruptAudioError,
    log_mel,
    mel_bands,
    read_audio,
    resampled,
    samples_in_memory,
    spec_augmented,
    window_samples,
)
from linvit.data.speech.librispeech import SUFFIXES

RATE = 16_000


def sine(hertz, seconds=1.0, rate=RATE):
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate).astype(np.float32)


def test_one_frame_is_the_formula():
    samples = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    places = np.arange(512)
    window = np.zeros(512)
    window[56:456] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)  # 25 ms in the middle of 512 samples
    second = samples.numpy()[160 : 160 + 512] * window
    power = [abs((second * np.exp(-2j * np.pi * bin * places / 512)).sum()) ** 2 for bin in range(257)]
    bands = []
    edges = [700 * (10 ** (m / 2595) - 1) for m in np.linspace(0, 2595 * math.log10(1 + 8000 / 700), 42)]
    for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False):
        hertz = [bin * RATE / 512 for bin in range(257)]
        weights = [max(0, min((f - low) / (middle - low), (high - f) / (high - middle))) for f in hertz]
        bands.append(math.log(sum(w * p for w, p in zip(weights, power, strict=True)) + FLOOR))
    found = log_mel(samples.float(), RATE, 40)
    assert found.shape == (1 + (1000 - 512) // 160, 40)
    assert found[1].tolist() == pytest.approx(bands, rel=1e-4, abs=1e-4)


def test_librosa_says_the_same():
    librosa = pytest.importorskip("librosa", reason="librosa is not installed")
    settings = {"sr": RATE, "n_fft": 512, "n_mels": 80, "htk": True, "norm": None}
    assert np.abs(librosa.filters.mel(**settings) - mel_bands(RATE, 512, 80).numpy()).max() < 1e-6
    samples = np.random.default_rng(0).normal(size=RATE).astype(np.float32)
    framed = {"win_length": 400, "hop_length": 160, "window": "hann", "center": False}
    power = librosa.feature.melspectrogram(y=samples, **settings, **framed)
    assert np.abs(np.log(power.T + FLOOR) - log_mel(torch.from_numpy(samples), RATE, 80).numpy()).max() < 1e-3


def test_frames_of_a_part_are_those_of_the_whole():
    samples = torch.from_numpy(sine(440))
    whole = log_mel(samples, RATE, 40)
    assert torch.allclose(log_mel(samples[1600:4000], RATE, 40), whole[10 : 10 + 12], atol=1e-4)
    assert len(whole) == 1 + (RATE - window_samples(RATE)) // 160


def test_resampling_keeps_a_tone():
    found = resampled(sine(440, rate=22_050), 22_050, RATE)
    assert len(found) == RATE
    assert np.abs(found - sine(440))[200:-200].max() < 2e-3


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_files_are_read_as_the_mean_of_their_channels(ending, tmp_path):
    path = tmp_path / f"a.{ending}"
    soundfile.write(path, np.stack((sine(440), np.zeros(RATE, np.float32)), 1) * 0.5, RATE)
    assert np.abs(read_audio(path, RATE).numpy() - sine(440) * 0.25).max() < 1e-4


def test_a_header_that_cannot_be_true_is_named(tmp_path):
    soundfile.write(tmp_path / "a.wav", sine(440), RATE)
    held = bytearray((tmp_path / "a.wav").read_bytes())
    held[24:28] = (2**31 - 1).to_bytes(4, "little")
    (tmp_path / "a.wav").write_bytes(held)
    with pytest.raises(CorruptAudioError, match="claims 2,147,483,647 samples per second"):
        read_audio(tmp_path / "a.wav", RATE)


@pytest.mark.parametrize("ending", ["wav", "aiff", "flac"])
def test_a_file_that_is_cut_off_is_named(ending, tmp_path):
    path = tmp_path / f"a.{ending}"
    soundfile.write(path, sine(440), RATE)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptAudioError, match=r"as sound \((it is cut off: it should have|flac decoder lost sync\))"):
        read_audio(path, RATE)
    if ending == "wav":
        for length in (2**31 - 1, 2**32 - 1):  # of a header written to a pipe
            path.write_bytes(whole[:40] + length.to_bytes(4, "little") + whole[44:])
            assert len(read_audio(path, RATE)) == RATE
        path.write_bytes(whole[:4] + (len(whole) + 8).to_bytes(4, "little") + whole[8:])  # a common mistake
        assert len(read_audio(path, RATE)) == RATE


@pytest.mark.parametrize("ending", ["mp3", "ogg", "opus", "aiff", "aif", "au", "caf", "w64"])
def test_each_ending_of_sound_is_read(ending, tmp_path):
    soundfile.write(tmp_path / f"a.{ending}", sine(440), RATE, format={"opus": "OGG", "aif": "AIFF"}.get(ending))
    assert f".{ending}" in SUFFIXES
    assert abs(len(read_audio(tmp_path / f"a.{ending}", RATE)) - RATE) < 100


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda samples: (samples * 32767).astype(np.int16), r"array of int16 \(16000,\), expected floats"),
        (lambda samples: samples * 32767, r"has the sample 32767, expected finite numbers in"),
        (lambda samples: np.append(samples, np.nan), "has the sample nan"),
        (lambda samples: torch.from_numpy(np.append(samples, -np.inf)), "has the sample inf"),
    ],
)
def test_samples_in_memory_are_checked(change, sentence):
    with pytest.raises(ValueError, match=f"The piece .*{sentence}"):
        samples_in_memory(change(sine(440)), "piece")
    for right in (">f4", "f2", "f8"):
        assert samples_in_memory(sine(440).astype(right)[::-1], "piece").dtype == torch.float32
    assert len(samples_in_memory([], "piece")) == 0


def test_a_file_is_read_as_far_as_it_may_be_long(tmp_path, monkeypatch):
    monkeypatch.setattr(audio, "BLOCK", 1000)
    path = tmp_path / "a.wav"
    soundfile.write(path, sine(440), RATE)
    assert np.abs(read_audio(path, RATE).numpy() - sine(440)).max() < 1e-4
    monkeypatch.setattr(audio, "MOST_SAMPLES", RATE - 1)
    with pytest.raises(CorruptAudioError, match=r"cannot be read as sound \(it is longer than 0\.0 hours\)"):
        read_audio(path, RATE)
    soundfile.write(path, sine(440)[: RATE // 2], RATE // 8)
    with pytest.raises(CorruptAudioError, match="it is longer than"):  # four times as many after resampling
        read_audio(path, RATE)


def test_a_name_that_is_not_utf_8_is_read(tmp_path):
    soundfile.write(tmp_path / "a.wav", sine(440), RATE)
    path = (tmp_path / "a.wav").rename(tmp_path / "\udcff.wav")
    assert len(read_audio(path, RATE)) == len(read_audio(str(path), RATE)) == RATE


def test_masks_are_bands_and_stretches_within_their_bounds():
    features = torch.ones(100, 80)
    widths, lengths = set(), set()
    for seed in range(200):
        torch.manual_seed(seed)
        masked = spec_augmented(features, bands=1, band_width=5, times=1, time_share=0.07)
        bands, frames = (masked == 0).all(0), (masked == 0).all(1)
        assert torch.equal(masked == 0, bands[None] | frames[:, None])
        for empty, found in ((bands, widths), (frames, lengths)):
            where = empty.nonzero().flatten().tolist()
            assert not where or where == list(range(where[0], where[-1] + 1))
            found.add(len(where))
    assert widths == set(range(6))
    assert lengths == set(range(8))
    assert torch.equal(features, torch.ones(100, 80))
