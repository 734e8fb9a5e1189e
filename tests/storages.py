"""What operators return, and how much of it is still in memory."""

from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONVOLUTION = torch.ops.aten.convolution.default


class Storages(TorchDispatchMode):
    """Every storage that an operator returns."""

    def __init__(self):
        super().__init__()
        self.bytes = {}
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        depthwise = function is CONVOLUTION and args[8] > 1
        self.calls["depthwise" if depthwise else function.overloadpacket.__name__] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.bytes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, known):
        return sum(
            count for place, (reference, count) in self.bytes.items() if place not in known and not reference.expired()
        )
