"""Linear attention in the models of transformers, by name: `attn_implementation="linvit:mala"`.

transformers gives its attention functions the queries, keys and values of all heads. That is all a mechanism without
layers of its own needs; RALA and MALA are used without gate, local term and rotation. What softmax attention alone has
(biases of pairs, windows, dropout of scores) is refused, so that no model becomes another one without a word.

"linvit:mala:LLSS" is a hybrid: MALA in the first two attention layers, softmax attention in the last two.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from linvit.arguments import is_traced
from linvit.errors import SettingError
from linvit.layers.mechanisms import LINEAR_AXES, MECHANISMS
from linvit.layers.token_attention import GatedAttention, TokenAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.ops import linear_attention
from linvit.ranges import lookup

PREFIX = "linvit:"
"""Begins the name of every implementation of ours."""
REFUSED: Mapping[str, str] = {
    "position_bias": "a bias for each pair of tokens",
    "softcap": "a cap on the scores",
    "s_aux": "sinks beside the scores",
    "sinks": "sinks beside the scores",
    "sliding_window": "a window around each token",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "cache": "a cache of keys and values",
}
"""Arguments of transformers' attention functions that linear attention cannot follow, and what they are."""
REMEDY = "use it where every token sees all, as in one part, `attn_implementation={'vision_config': 'linvit:mala'}`"


def register_with_transformers() -> None:
    """Makes "linvit:NAME" an attention implementation of transformers, for each mechanism without layers of its own.

    Models of transformers that use its attention interface can then be created, loaded or changed with
    `attn_implementation="linvit:mala"` (`from_pretrained`, `from_config`, `set_attn_implementation`). A mask of
    padding becomes the mask of keys. The name is stored with the configuration: `save_pretrained` writes it to
    config.json, so that `from_pretrained` returns a linear model again, or, where linvit is not imported, an error of
    transformers that quotes the name. A model whose attention does not use the interface is refused.

    Importing linvit after transformers does this already; call it again after `linvit.register_mechanism`.

    Raises:
        ImportError: if transformers is not installed, or too old.
    """
    try:
        from transformers import PreTrainedConfig, PreTrainedModel
    except ImportError as error:
        raise ImportError("transformers 5 is not installed: pip install 'linvit[hf]'.") from error
    _extend(PreTrainedConfig, PreTrainedModel)
    for name in interface_names():
        _register(name)


def _register(name: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    mechanism, pattern = _meaning(name)
    AttentionInterface.register(name, partial(_attention, name=name, mechanism=mechanism, hybrid=bool(pattern)))
    AttentionMaskInterface.register(name, _key_mask)


@cache
def _extend(configuration: Any, model: Any) -> None:
    """Lets configurations store our names, and models know which layers of a hybrid are linear; once.

    Models that would ignore our names refuse them.
    """
    configuration.to_dict = _with_implementation(configuration.to_dict)
    model.get_correct_attn_implementation = _only_with_interface(model.get_correct_attn_implementation)
    model.post_init = _with_letters(model.post_init)


def interface_names() -> list[str]:
    """The names that `register_with_transformers` registers, such as "linvit:mala"."""
    return [PREFIX + name for name, axes in LINEAR_AXES.items() if _needs_no_weights(name, axes)]


def _needs_no_weights(name: str, axes: Mapping[str, Any]) -> bool:
    values = [each for value in axes.values() for each in (value if isinstance(value, tuple) else (value,))]
    learns = any(isinstance(value, nn.Module) for value in values)
    plain = TOKEN_LAYERS[name] in (TokenAttention, GatedAttention) and not MECHANISMS[name].local_feed_forward
    return plain and not learns


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    name: str,
    mechanism: str,
    hybrid: bool,
    **options: Any,
) -> tuple[Tensor, None]:
    """Linear attention as a function of transformers.

    query: (batch, heads, queries, width). key, value: (batch, heads or a divisor, tokens, width). attention_mask: True
    where a token counts, (batch, tokens) or the same for every query, as scaled_dot_product_attention reads it. Returns
    (batch, queries, heads, width).
    """
    if hybrid and _letter(module, name) == "S":
        return _softmax(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)
    attention_mask = _of_keys(attention_mask)
    _check_supported(module, name, attention_mask, dropout, is_causal, options)
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    if not math.isclose(factor, 1.0):  # some models scale their queries themselves, and logits by another factor
        query = query * factor
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    axes = LINEAR_AXES[mechanism]
    y = linear_attention(query, key, value, key_mask=attention_mask, cu_seqlens=options.get("cu_seq_lens_q"), **axes)
    return y.transpose(1, 2), None


def _of_keys(mask: Tensor | None) -> Tensor | None:
    """A mask of pairs as one of keys, if it is the same for all heads and queries; any other as it is."""
    if mask is None or mask.ndim != 4 or mask.dtype != torch.bool or is_traced():
        return mask
    first = mask[:, 0, 0]
    return first if torch.equal(mask, first[:, None, None].expand_as(mask)) else mask


def _softmax(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    """Softmax attention of transformers, with our mask of keys."""
    from transformers import AttentionInterface

    query, key, value, mask, *others = tensors
    mask = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
    return AttentionInterface()["sdpa"](module, query, key, value, mask, *others, **options)


def _check_supported(
    module: nn.Module,
    name: str,
    attention_mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    options: Mapping[str, Any],
) -> None:
    where = f"`attn_implementation` is {name!r}, but {type(module).__name__}"
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        raise SettingError(f"{where} is causal, expected attention to all tokens: {REMEDY}.")
    given = [words for key, words in REFUSED.items() if options.get(key) is not None]
    if given:
        raise SettingError(f"{where} has {given[0]}, which linear attention has not: {REMEDY}.")
    if options.get("output_attentions"):
        raise SettingError(f"{where} is asked for scores, which it never computes: leave `output_attentions` out.")
    if dropout > 0:
        raise SettingError(
            f"{where} drops {dropout:g} of its scores in training, expected 0, because there are none: set the dropout "
            "of attention to 0 in the configuration (`attention_dropout` or `attention_probs_dropout_prob`)."
        )
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.is_floating_point():
        raise SettingError(
            f"{where} got a mask of {attention_mask.dtype}, such as a teacher with attention 'eager' makes, expected"
            " one of bool: call teacher.set_attn_implementation('sdpa')."
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise SettingError(
            f"{where} got a mask of shape {tuple(attention_mask.shape)}, expected one of padding, (batch, tokens): "
            "give the model that one."
        )


def _key_mask(
    *, mask_function: Callable[..., Any], attention_mask: Tensor | None, config: Any, **sizes: Any
) -> Tensor | None:
    """The mask that `_attention` gets, True where a token counts, (batch, tokens); None if all count."""
    from transformers.masking_utils import bidirectional_mask_function

    if mask_function is not bidirectional_mask_function:
        raise SettingError(
            f"`attn_implementation` is {config._attn_implementation!r}, but the model of {type(config).__name__} has"
            f" a causal mask or one of windows, expected attention to all tokens: {REMEDY}."
        )
    if attention_mask is None or (not is_traced() and bool(attention_mask.all())):
        return None
    return attention_mask


def _with_implementation(to_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """`PreTrainedConfig.to_dict`, which leaves the implementation out, with ours."""

    @wraps(to_dict)
    def with_implementation(config: Any) -> dict[str, Any]:
        output, ours = to_dict(config), _ours(config)
        return output if ours is None else {**output, "attn_implementation": ours}

    return with_implementation


def _ours(config: Any) -> Any:
    """The implementations of a configuration and those in it, as transformers reads them; None if none is ours."""
    name = config._attn_implementation
    whole = isinstance(name, str) and name.startswith(PREFIX)
    inner = {key: held for key in config.sub_configs if (held := getattr(config, key, None)) is not None}
    names = {key: _ours(held) or (held._attn_implementation if whole else None) for key, held in inner.items()}
    others = {key: other for key, other in names.items() if other not in (None, name)}
    if not whole:
        return others or None
    return {"": name, **others} if others else name


def _only_with_interface(check: Callable[..., str]) -> Callable[..., str]:
    """`PreTrainedModel.get_correct_attn_implementation`, which knows names only, for models that would ignore ours."""

    @wraps(check)
    def only_with_interface(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        ours, pattern = str(requested_attention).startswith(PREFIX), _meaning(requested_attention)[1]
        if ours and not pattern and requested_attention not in interface_names():
            known = ", ".join(interface_names())
            raise SettingError(
                f"`attn_implementation` is {requested_attention!r}, expected one of {known}, or a hybrid, such as "
                "'linvit:mala:LLSS': choose another, or linvit.swap_attention on a network of timm."
            )
        if ours and not _asks_for_attention(model):
            raise SettingError(
                f"`attn_implementation` is {requested_attention!r}, but the attention of {type(model).__name__} does "
                "not use the interface of transformers: choose another model, or linvit.swap_attention for one of timm."
            )
        if requested_attention is not None and pattern:
            if len(attention_layers(model)) not in (0, len(pattern)):  # 0 before they are made
                raise _miscounted(requested_attention)
            _register(requested_attention)
            _give_letters(model, pattern)
        return check(model, requested_attention, *args, **kwargs)

    return only_with_interface


def _with_letters(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """`PreTrainedModel.post_init`, after which a hybrid's layers know what they are."""

    @wraps(post_init)
    def with_letters(model: Any) -> None:
        post_init(model)
        _give_letters(model, _meaning(model.config._attn_implementation)[1])

    return with_letters


def _asks_for_attention(model: Any) -> bool:
    return bool(model._can_set_attn_implementation()) and not model.config.model_type.startswith("timm_")


def _meaning(name: str | None) -> tuple[str, str]:
    """The mechanism of a name of ours and the pattern of a hybrid; both empty for another name."""
    mechanism, _, pattern = str(name).removeprefix(PREFIX).partition(":")
    ours = str(name).startswith(PREFIX) and PREFIX + mechanism in interface_names() and not set(pattern) - set("LS")
    return (mechanism, pattern) if ours else ("", "")


def _give_letters(model: Any, pattern: str) -> None:
    layers = attention_layers(model) if pattern else []
    if len(layers) == len(pattern):  # a model inside another one has fewer
        for layer, letter in zip(layers, pattern, strict=True):
            layer.letter = letter


def _letter(module: nn.Module, name: str) -> str:
    letter: str | None = getattr(module, "letter", None)
    if letter is None:
        raise _miscounted(name)
    return letter


def _miscounted(name: str) -> SettingError:
    return SettingError(
        f"`attn_implementation` is {name!r}, but the model has another number of attention layers, expected one letter "
        "for each: correct it."
    )


def attention_layers(model: Any) -> list[Any]:
    """The attention layers that have the configuration of a model of transformers, in its order."""
    return [
        layer
        for layer in model.modules()
        if getattr(layer, "config", None) is model.config and _uses_interface(type(layer).forward)
    ]


@cache
def _uses_interface(forward: Callable[..., Any]) -> bool:
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(forward)
    except (OSError, TypeError):  # written in a console
        return False


def of_transformers(model: object) -> bool:
    """Whether a network is one of transformers, which is not imported for that."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def set_attention(model: Any, mechanism: str, pattern: str) -> None:
    """Gives a model of transformers an implementation of ours, in place; pattern: a letter for each layer."""
    register_with_transformers()
    lookup("mechanism", mechanism, dict.fromkeys(name.removeprefix(PREFIX) for name in interface_names()))
    model.set_attn_implementation(f"{PREFIX}{mechanism}" + (f":{pattern}" if "S" in pattern else ""))


def linear_layers(model: Any) -> list[nn.Module]:
    """The attention layers of a model of transformers that are linear, in its order."""
    mechanism, pattern = _meaning(model.config._attn_implementation)
    layers = attention_layers(model)
    letters = pattern or ("L" if mechanism else "S") * len(layers)
    return [layer for layer, letter in zip(layers, letters, strict=True) if letter == "L"]
