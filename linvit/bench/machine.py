"""A description of the machine on which speeds were measured."""

import os
import platform
from typing import Any

import torch

from linvit.environment import processor, processor_facts
from linvit.errors import SettingError

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


def check_device(device: str) -> None:
    """Raises ValueError for a GPU that is not there."""
    if device != "cpu" and not torch.cuda.is_available():
        raise SettingError(f"`device` is {device!r}, but torch sees no GPU here: leave it out to measure the CPU.")


def describe(device: str, threads: int) -> dict[str, Any]:
    """processor, instructions (those that matter here), cores, memory_gib, load, threads, torch, python, gpu."""
    facts = processor_facts()
    known = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "processor": processor(),
        "instructions": [name for name in INSTRUCTIONS if name in known],
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if device != "cpu" else None,
    }


def sentence(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    facts = [
        *([machine["gpu"], machine["processor"]] if machine["gpu"] else _of_processor(machine)),
        "freed memory kept" if machine.get("keeps_memory") else "",
        f"torch {machine['torch']}",
        f"commit {machine['commit'][:12]}{'-dirty' * machine['commit'].endswith('-dirty')}"
        if machine.get("commit")
        else "",
    ]
    return "; ".join(filter(None, facts))


def _of_processor(machine: dict[str, Any]) -> list[str]:
    return [
        machine["processor"],
        " ".join(machine["instructions"]),
        f"{machine['cores']} cores, {machine['threads']} used",
        f"load {' '.join(map(str, machine['load']))}" if machine["load"] else "",
    ]
