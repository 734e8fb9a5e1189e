"""Sound files as features: samples at a fixed rate, log-mel bands, and random masks for training."""

import contextlib
import io
import os
import re
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from linvit.data.disk import check_regular
from linvit.files import explained, reason_of

if TYPE_CHECKING:
    from soundfile import SoundFile

WINDOW, HOP = 0.025, 0.010  # seconds
SLOWEST, FASTEST = 1000, 1_000_000  # hertz; other rates occur in damaged headers only
MOST_SAMPLES = 2**28  # as read and as resampled: 1 GiB, 4.6 hours at 16 kHz
SPHERE_HEADER = 1024  # bytes
BLOCK = 2**22  # values read at a time, because a header may claim more samples than there are
FLOOR = 1e-6  # added before the logarithm
LOUDEST = 64.0  # a sample beyond it is an integer that became a float
CUT_OFF = re.compile(r"(?:data|riff|form|ssnd|size)\s*: (\d+) \(should be (\d+)\)", re.IGNORECASE)
UNKNOWN_LENGTH = 2**31 - 2**16  # and above: in a header written to a pipe


class CorruptAudioError(ValueError):
    """A sound file that cannot be read, or that is too short or too long."""


def read_audio(path: str | Path, rate: int, content: bytes | None = None) -> Tensor:
    """Samples of a sound file in −1 … 1, float32 (samples,), averaged over its channels and resampled to rate (hertz).

    Reads all formats of libsndfile: wav, flac, ogg, mp3, NIST's SPHERE (PCM and µ-law, not compressed) and others; from
    `content` if the file is in memory.

    Raises:
        CorruptAudioError: for a file that is missing or damaged, has samples that are not finite, is shorter than one
            frame of features or longer than MOST_SAMPLES.
        ImportError: if soundfile is not installed.
    """
    with explained("Sound is read with soundfile: pip install 'linvit[train,speech]'.", ImportError, ImportError):
        import soundfile
    source: bytes | IO[bytes] = os.fsencode(path) if content is None else io.BytesIO(content)
    try:
        if content is None:
            check_regular(path)
        with soundfile.SoundFile(source) as file:
            file_rate = file.samplerate
            samples = _mono(file, rate)
    except Exception as error:  # the library raises many classes, TypeError for samples without a header
        reason = reason_of(error)
        if isinstance(error, soundfile.LibsndfileError):  # a file that could be opened
            reason = _compression(path, content) or error.error_string.removeprefix("Error : ").rstrip(".")
        raise CorruptAudioError(
            f"{path} cannot be read as sound ({reason}): use another copy, or a .wav or .flac file, or leave it out."
        ) from error
    if not np.isfinite(samples).all():
        raise CorruptAudioError(f"{path} has samples that are not finite numbers: repair it, or leave it out.")
    seconds, shortest = len(samples) / file_rate, window_samples(rate) / rate
    mono = resampled(samples, file_rate, rate) if len(samples) else samples
    if len(mono) < window_samples(rate):
        raise CorruptAudioError(
            f"{path} is {seconds:.3f} s ({len(mono)} samples) long, shorter than one frame of {shortest:.3f} s"
            f" ({window_samples(rate)}): leave it out."
        )
    return torch.from_numpy(mono)


def samples_in_memory(item: Any, name: str) -> Tensor:
    """Samples in memory, float (samples,) in −1 … 1, as float32; `name` names them in messages."""
    array = item if isinstance(item, Tensor) else np.asarray(item)
    is_float = array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"
    if array.ndim != 1 or not is_float:
        raise ValueError(
            f"The {name} is an array of {array.dtype} {tuple(array.shape)}, expected floats (samples,) in −1 … 1:"
            " convert it; divide integers by their largest value."
        )
    samples = array.float().cpu() if isinstance(array, Tensor) else torch.from_numpy(array.astype(np.float32))
    if len(samples) and not (largest := samples.abs().max()) <= LOUDEST:
        raise CorruptAudioError(
            f"The {name} has the sample {largest:g}, expected finite numbers in −1 … 1: scale or repair it."
        )
    return samples


def _compression(path: str | Path, content: bytes | None) -> str:
    """The reason why libsndfile does not read a file, if it is compressed sound in SPHERE; "" otherwise."""
    if content is None:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            content = file.read(SPHERE_HEADER)
    header = (content or b"")[:SPHERE_HEADER]
    coding = re.search(rb"^sample_coding -s\d+ (.*(?:shorten|wavpack).*)$", header, re.MULTILINE)
    return f"it is compressed as {coding[1].decode(errors='replace')}" if coding else ""


def _mono(file: "SoundFile", rate: int) -> np.ndarray:
    """The mean of a file's channels, read in blocks; raises ValueError for an odd rate or length."""
    if not SLOWEST <= file.samplerate <= FASTEST:
        raise ValueError(f"its header claims {file.samplerate:,} samples per second")
    for claimed, held in CUT_OFF.findall(file.extra_info):  # bytes in the header, and in the file
        if 1.01 * int(held) < int(claimed) < UNKNOWN_LENGTH:
            raise ValueError(f"it is cut off: it should have {int(claimed):,} bytes and has {int(held):,}")
    most = MOST_SAMPLES * min(1, file.samplerate / rate)
    blocks = [np.zeros(0, np.float32)]
    while sum(map(len, blocks)) <= most:
        block = file.read(BLOCK // file.channels, dtype="float32", always_2d=True)
        if not len(block):
            return np.concatenate(blocks)
        blocks.append(block.mean(axis=1))
    raise ValueError(f"it is longer than {most / file.samplerate / 3600:.1f} hours")


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """The samples (samples,) at another rate in hertz, by a polyphase filter; float32."""
    if rate == wanted:
        return samples
    from scipy.signal import resample_poly

    common = gcd(rate, wanted)
    return np.asarray(resample_poly(samples, wanted // common, rate // common), np.float32)


def window_samples(rate: int) -> int:
    """Samples of a frame: the smallest power of two that is not shorter than a window."""
    return 1 << (round(WINDOW * rate) - 1).bit_length()


def log_mel(samples: Tensor, rate: int, mels: int) -> Tensor:
    """Logarithm of the power in `mels` bands, float32 (frames, mels), with a frame every 10 ms.

    A frame is a Hann window of 25 ms, padded to a power of two. No frame reaches beyond the first or last sample, so
    the frames of an excerpt equal those of the full recording.

    Args:
        samples: float32 (samples,), at least `window_samples(rate)` of them.
        rate: in hertz.
        mels: number of bands between 0 and half the rate.
    """
    size, length = window_samples(rate), round(WINDOW * rate)
    spectrum = torch.stft(
        samples,
        size,
        hop_length=round(HOP * rate),
        win_length=length,
        window=torch.hann_window(length),
        center=False,
        return_complex=True,
    )
    power = spectrum.real.square() + spectrum.imag.square()
    return (mel_bands(rate, size, mels) @ power + FLOOR).log().T


@lru_cache(maxsize=8)
def mel_bands(rate: int, size: int, mels: int) -> Tensor:
    """Triangular filters of height 1, float32 (mels, size / 2 + 1), evenly spaced in 2595·log10(1 + hertz / 700)."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, mels + 2) / 2595) - 1)
    hertz = np.linspace(0, rate / 2, size // 2 + 1)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return torch.from_numpy(np.minimum(rising, falling).clip(0)).float()


def spec_augmented(features: Tensor, bands: int, band_width: int, times: int, time_share: float) -> Tensor:
    """A copy of the features in which random bands and stretches of time are zero, which is their mean.

    Args:
        features: (frames, mels).
        bands: number of frequency masks.
        band_width: largest width of a frequency mask, in bands.
        times: number of time masks.
        time_share: largest length of a time mask, as a share of all frames.

    Source: SpecAugment (Interspeech 2019) with the adaptive sizes of arXiv 1912.05533, without time warping.
    """
    frames, mels = features.shape
    features = features.clone()
    for axis, count, largest in ((1, bands, min(band_width, mels)), (0, times, int(time_share * frames))):
        for _ in range(count):
            size = int(torch.randint(largest + 1, ()))
            start = int(torch.randint(features.shape[axis] - size + 1, ()))
            features.narrow(axis, start, size).zero_()
    return features
