"""Stand-ins for tests: random weights instead of the trained ones in the package, and a tiny CIFAR-10."""

import timm
import torch
from timm.models import _registry

from linvit.models.family import CIFAR10
from linvit.released import rounded, write_weights


def write_stand_ins(folder, monkeypatch):
    """Writes a float16 file for each network with weights into folder/weights, where they are then looked for.

    Returns the float32 networks by name.
    """
    (folder / "weights").mkdir()
    networks = {}
    for number, name in enumerate(sorted(timm.list_pretrained("*.cifar10"))):
        torch.manual_seed(number)
        networks[name] = timm.create_model(name).eval()
        path = folder / "weights" / f"{name}.safetensors"
        write_weights(rounded(networks[name].state_dict()), path)
        monkeypatch.setattr(_registry._model_pretrained_cfgs[name], "file", str(path))
    return networks


def write_black_cifar10(folder, per_file=1):
    """CIFAR-10 with a few images per file, black and called airplanes."""
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10))
    for file in ("test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        (folder / f"{file}.bin").write_bytes(bytes(3073 * per_file))
