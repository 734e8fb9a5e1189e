"""Core ML programs computed by torch, operation by operation: a stand-in for the runtime, which exists on macOS alone.

The operations are written as coremltools describes them (coremltools.converters.mil.mil.ops.defs).
"""

from pathlib import Path

import numpy as np
import torch
from coremltools.converters.mil.frontend.milproto.load import load
from coremltools.models import MLModel
from torch.nn import functional as F

TYPES = {"fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}


def _padding(pad_type, pad):
    assert pad_type in ("custom", "valid")
    return (0, 0, 0, 0) if pad is None or pad_type == "valid" else (pad[2], pad[3], pad[0], pad[1])


def _conv(x, weight, bias=None, strides=(1, 1), pad_type="valid", pad=None, dilations=(1, 1), groups=1):
    x = F.pad(x, _padding(pad_type, pad))
    return F.conv2d(x, weight, bias, tuple(strides), 0, tuple(dilations), int(groups))


def _max_pool(x, kernel_sizes, strides=(1, 1), pad_type="valid", pad=None, ceil_mode=False):
    x = F.pad(x, _padding(pad_type, pad), value=-torch.inf)
    return F.max_pool2d(x, tuple(kernel_sizes), tuple(strides), ceil_mode=bool(ceil_mode))


def _layer_norm(x, axes, gamma=None, beta=None, epsilon=1e-5):
    wide, axes = x.float(), [int(axis) % x.ndim for axis in axes]
    shape = [length if axis in axes else 1 for axis, length in enumerate(x.shape)]
    centred = wide - wide.mean(axes, keepdim=True)
    normed = (centred / (centred.square().mean(axes, keepdim=True) + epsilon).sqrt()).to(x.dtype)
    normed = normed if gamma is None else normed * gamma.reshape(shape)
    return normed if beta is None else normed + beta.reshape(shape)


def _pad(x, pad, mode="constant", constant_val=0.0):
    assert mode == "constant"
    last_first = [int(number) for axis in reversed(np.reshape(pad, (-1, 2))) for number in axis]
    return F.pad(x, last_first, value=float(constant_val))


def _slice(x, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None):
    assert stride is None or min(stride) > 0
    begin_mask, end_mask = (None if mask is None else list(mask) for mask in (begin_mask, end_mask))
    no, step = [False] * x.ndim, [1] * x.ndim if stride is None else stride
    starts = [None if masked else int(each) for each, masked in zip(begin, begin_mask or no, strict=True)]
    ends = [None if masked else int(each) for each, masked in zip(end, end_mask or no, strict=True)]
    dropped = [False] * x.ndim if squeeze_mask is None else squeeze_mask
    bounds = zip(starts, ends, map(int, step), dropped, strict=True)
    return x[tuple(start or 0 if drop else slice(start, end, by) for start, end, by, drop in bounds)]


def _matmul(x, y, transpose_x=False, transpose_y=False):
    return (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)


OPERATIONS = {
    "add": lambda x, y: x + y,
    "batch_norm": lambda x, mean, variance, gamma, beta, epsilon: F.batch_norm(
        x, mean, variance, gamma, beta, eps=float(epsilon)
    ),
    "cast": lambda x, dtype: x.to(TYPES[dtype]),
    "clip": lambda x, alpha, beta: x.clamp(float(alpha), float(beta)),
    "concat": lambda values, axis, interleave=False: torch.cat(list(values), int(axis)),
    "conv": _conv,
    "elu": lambda x, alpha=1.0: F.elu(x, float(alpha)),
    "equal": lambda x, y: x == y,
    "exp": lambda x: x.exp(),
    "expand_dims": lambda x, axes: x[(..., *[None] * len(axes))].movedim(-1, int(axes[0])),
    "gather": lambda x, indices, axis=0, batch_dims=0, validate_indices=False: x.index_select(
        int(axis), torch.as_tensor(indices).long()
    ),
    "gelu": lambda x, mode: F.gelu(x, approximate="none" if mode == "EXACT" else "tanh"),
    "inverse": lambda x, epsilon=1e-4: 1 / (x + epsilon),
    "layer_norm": _layer_norm,
    "linear": lambda x, weight, bias=None: F.linear(x, weight, bias),
    "matmul": _matmul,
    "max_pool": _max_pool,
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "mul": lambda x, y: x * y,
    "pad": _pad,
    "real_div": lambda x, y: x / y,
    "reduce_max": lambda x, axes, keep_dims=False: x.amax([int(axis) for axis in axes], bool(keep_dims)),
    "reduce_mean": lambda x, axes, keep_dims=False: x.mean([int(axis) for axis in axes], bool(keep_dims)),
    "reduce_sum": lambda x, axes, keep_dims=False: x.sum([int(axis) for axis in axes], bool(keep_dims)),
    "relu": lambda x: x.relu(),
    "reshape": lambda x, shape: x.reshape([int(length) for length in shape]),
    "rsqrt": lambda x, epsilon=1e-12: (x + epsilon).rsqrt(),
    "select": lambda cond, a, b: torch.where(cond, torch.as_tensor(a, dtype=b.dtype), b),
    "sigmoid": lambda x: x.sigmoid(),
    "silu": lambda x: F.silu(x),
    "slice_by_index": _slice,
    "softmax": lambda x, axis: x.softmax(int(axis)),
    "split": lambda x, axis, num_splits=None, split_sizes=None: x.split(
        x.shape[int(axis)] // int(num_splits) if split_sizes is None else [int(size) for size in split_sizes], int(axis)
    ),
    "sqrt": lambda x: x.sqrt(),
    "squeeze": lambda x, axes: x.squeeze([int(axis) for axis in axes]),
    "stack": lambda values, axis: torch.stack(list(values), int(axis)),
    "sub": lambda x, y: x - y,
    "tanh": lambda x: x.tanh(),
    "transpose": lambda x, perm: x.permute([int(axis) for axis in perm]),
    "upsample_bilinear": lambda x, scale_factor_height, scale_factor_width, align_corners: F.interpolate(
        x, scale_factor=(float(scale_factor_height), float(scale_factor_width)), mode="bilinear",
        align_corners=bool(align_corners),
    ),
    "upsample_nearest_neighbor": lambda x, scale_factor_height, scale_factor_width: F.interpolate(
        x, scale_factor=(float(scale_factor_height), float(scale_factor_width))
    ),
}  # fmt: skip


def computed(path, images):
    """The outputs, by name, of a package for images (1, channels, height, width) of 0..255, float32."""
    model = MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    program = load(spec, spec.specificationVersion, model.weights_dir).functions["main"]
    known = dict.fromkeys(program.inputs, images)

    def value(given):
        if isinstance(given, tuple | list):
            return [value(each) for each in given]
        if given.name in known:
            return known[given.name]
        assert given.val is not None, given.name
        floats = isinstance(given.val, np.ndarray | np.generic) and given.val.dtype.kind == "f"
        return torch.from_numpy(np.array(given.val)) if floats else given.val

    for operation in program.operations:
        if operation.op_type == "const":
            continue
        inputs = {name: value(given) for name, given in operation.inputs.items() if given is not None}
        results = OPERATIONS[operation.op_type](**inputs)
        results = results if isinstance(results, tuple) else (results,)
        known.update({output.name: result for output, result in zip(operation.outputs, results, strict=True)})
    return {output.name: known[output.name] for output in program.outputs}


def on_macos(monkeypatch):
    """Lets Core ML run here, computed by torch."""
    monkeypatch.setattr("linvit.deploy.runtimes.system", lambda: "Darwin")
    monkeypatch.setattr(MLModel, "predict", _predict)


def _predict(self, data):
    pixels = np.asarray(data["images"], dtype=np.float32)
    images = torch.from_numpy(pixels)[None] if pixels.ndim == 2 else torch.from_numpy(pixels).movedim(-1, 0)
    return {name: each.numpy() for name, each in computed(Path(self.package_path), images[None]).items()}
