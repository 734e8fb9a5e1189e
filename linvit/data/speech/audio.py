"""Sound files to features: samples at one rate, log-mel bands, and their masks in training."""

import io
from functools import lru_cache
from math import gcd
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

WINDOW, HOP = 0.025, 0.010  # seconds
FASTEST = 1_000_000  # hertz; a higher rate is that of a damaged header
FLOOR = 1e-6  # added before the logarithm


class CorruptAudioError(ValueError):
    """A sound file that cannot be read, or holds too little."""


def read_audio(path: str | Path, rate: int, content: bytes | None = None) -> Tensor:
    """Samples of a file in -1 … 1, float32 (samples,), the mean of its channels, brought to this rate in hertz.

    Reads what libsndfile reads: wav, flac, ogg, mp3 and others; from `content` where the file is held in memory.

    Raises:
        CorruptAudioError: for a file that is missing, no sound, not finite, or shorter than one frame of features.
        ImportError: where soundfile is not installed.
    """
    try:
        import soundfile
    except ImportError as error:
        raise ImportError("Sound is read with soundfile: pip install 'linvit[train,speech]'.") from error
    try:
        source = str(path) if content is None else io.BytesIO(content)
        samples, file_rate = soundfile.read(source, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError, TypeError) as error:  # TypeError: samples without a header, .raw
        if content is None and not Path(path).is_file():
            raise CorruptAudioError(f"There is no sound file at {path}: check the path.") from error
        raise CorruptAudioError(
            f"{path} cannot be read as sound: give a .wav or .flac file, or leave this one out."
        ) from error
    if not 1 <= file_rate <= FASTEST:
        raise CorruptAudioError(f"{path} claims {file_rate:,} samples per second: it is damaged, leave it out.")
    if not np.isfinite(samples).all():
        raise CorruptAudioError(f"{path} has samples that are not finite numbers: repair it, or leave it out.")
    seconds, shortest = len(samples) / file_rate, window_samples(rate) / rate
    mono = resampled(samples.mean(axis=1), file_rate, rate) if len(samples) else samples[:, 0]
    if len(mono) < window_samples(rate):
        raise CorruptAudioError(
            f"{path} is {seconds:.3f} s long, shorter than one frame of {shortest:.3f} s: leave it out."
        )
    return torch.from_numpy(mono)


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """The samples at another rate in hertz, by a polyphase filter."""
    if rate == wanted:
        return samples
    from scipy.signal import resample_poly

    common = gcd(rate, wanted)
    return resample_poly(samples, wanted // common, rate // common).astype(np.float32)


def window_samples(rate: int) -> int:
    """Samples that a frame sees: the power of two that holds a window."""
    return 1 << (round(WINDOW * rate) - 1).bit_length()


def log_mel(samples: Tensor, rate: int, mels: int) -> Tensor:
    """Logarithms of the power in `mels` bands, float32 (frames, mels), a frame every 10 ms.

    A frame is a Hann window of 25 ms in the middle of the power of two samples that holds it; there is no frame that
    would need samples before the first or after the last, so those of an excerpt are those of the whole.

    Args:
        samples: float32 (samples,), at least `window_samples(rate)`.
        rate: in hertz.
        mels: bands between 0 and half the rate.
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
    """Triangles of height one, evenly apart in mel = 2595·log10(1 + hertz / 700), (mels, size / 2 + 1), float32."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, mels + 2) / 2595) - 1)
    hertz = np.linspace(0, rate / 2, size // 2 + 1)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return torch.from_numpy(np.minimum(rising, falling).clip(0)).float()


def spec_augmented(features: Tensor, bands: int, band_width: int, times: int, time_share: float) -> Tensor:
    """Features with random bands and stretches of time set to zero, their mean, by torch's generator.

    Args:
        features: (frames, mels), not changed.
        bands: how many masks of neighbouring bands, each 0 … band_width wide.
        band_width: at most all of them.
        times: how many masks of neighbouring frames, each 0 … time_share · frames long.
        time_share: of all frames.

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
