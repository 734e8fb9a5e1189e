"""Networks by name outside timm: decoders, Conformers and DiTs, with their sizes and arguments."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from linvit.errors import SettingError
from linvit.models import conformer, dit, sequence
from linvit.ranges import check, known


class Family(NamedTuple):
    """A class whose first argument is the number of outputs, its plural for messages, and its named sizes."""

    network: type[nn.Module]
    plural: str
    sizes: Mapping[str, Mapping[str, int]]


FAMILIES = {
    "sequence": Family(sequence.Decoder, "decoders", sequence.SIZES),
    "speech": Family(conformer.Conformer, "networks for speech recognition", conformer.SIZES),
    "generation": Family(dit.DiT, "image generators", dit.SIZES),
}


def create(name: str, outputs: int, /, *, family: str | None = None, **arguments: Any) -> nn.Module:
    """A network by its name, with that number of outputs.

    Args:
        name: such as "sequence_nano", "conformer_small" or "dit_small_patch2".
        outputs: number of tokens or classes.
        family: a key of FAMILIES, to accept only its names.
        arguments: of the network's class; they override those of the name.

    Raises ValueError for an unknown name or argument; the message offers the nearest.
    """
    check({"name": str}, {"name": name})
    families = FAMILIES.values() if family is None else [known("family", family, FAMILIES)]
    names = {size: entry for entry in families for size in entry.sizes}
    if name not in names:
        plural = " and ".join(entry.plural for entry in families)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ValueError(f"Unknown model {name!r}: did you mean {near!r}? The {plural} are {', '.join(names)}.")
    network, sizes = names[name].network, names[name].sizes[name]
    known_arguments = list(inspect.signature(network).parameters)[1:]
    for argument in arguments:
        if argument not in known_arguments:
            near = difflib.get_close_matches(argument, known_arguments, n=1, cutoff=0.0)[0]
            raise SettingError(f"{name} has no argument {argument!r}: did you mean `{near}`?")
    return network(outputs, **{**sizes, **arguments})
