"""Linear attention in the networks of transformers, by name."""

import json
import re
import subprocess
import sys

import pytest
import timm
import torch
from tiers import quick
from torch.testing import assert_close

import linvit
from linvit.errors import SettingError
from linvit.layers.mechanisms import LINEAR_AXES, MECHANISMS
from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.models import hugging_face
from linvit.models.hugging_face import attention_layers, interface_names
from linvit.ops import attention_scores

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from tiny_transformers import ARCHITECTURES, IMAGE, LAYERS, SMALL, SPECIAL, TEXT, TEXTS, TOKENS, Tiny, drawn  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

NAMES = ("linear", "linear_relu", "linear_exp", "efficient", "rala", "mala", "rala_mala")
AS_HERE = {"lepe": False, "modulation": "none", "rope": False}


@pytest.fixture(autouse=True, scope="module")
def registered():
    linvit.register_with_transformers()


@pytest.fixture
def calls(monkeypatch):
    """The layers that called linear attention."""
    called = set()
    check = hugging_face._check_supported

    def noting(module, *args):
        called.add(module)
        check(module, *args)

    monkeypatch.setattr(hugging_face, "_check_supported", noting)
    return called


def test_the_mechanisms_without_layers_of_their_own_have_a_name():
    assert interface_names() == [f"linvit:{name}" for name in NAMES]
    assert {*interface_names()} <= {*AttentionInterface()} & {*AttentionMaskInterface()}


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=re.escape("transformers 5 is not installed: pip install 'linvit[hf]'.")):
        linvit.register_with_transformers()


def test_registering_again_changes_nothing():
    before = transformers.PreTrainedConfig.to_dict
    linvit.register_with_transformers()
    assert transformers.PreTrainedConfig.to_dict is before


QUICK = ("DINOv2", "DINOv3", "SigLIP 2", "Qwen2.5-VL", "Gemma 4", "VideoMAE", "Whisper", "ALBERT")


@pytest.mark.parametrize("name", quick(ARCHITECTURES, QUICK))
def test_every_architecture_is_linear_in_all_layers_and_learns(name, calls):
    tiny = ARCHITECTURES[name]
    model = tiny.build("linvit:mala").train()
    before = tiny.read(model)
    assert len(calls) == LAYERS.get(name, 2)
    loss = (before - 1).square().mean()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert (tiny.read(model) - 1).square().mean() < loss
    model.set_attn_implementation("eager")
    calls.clear()
    tiny.read(model)
    assert not calls


TIMMS = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.class_embedding", "cls_token"),
    ("embeddings.distillation_token", "dist_token"),
    ("embeddings.register_tokens", "reg_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.position_embedding.weight", "pos_embed"),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("pre_layrnorm.", "norm_pre."),
    ("post_layernorm.", "norm."),
    ("encoder.", ""),
    ("layernorm.", "norm."),
    ("layers.", "blocks."),
    ("layer.", "blocks."),
    (".self_attn.", ".attn."),
    (".attention.", ".attn."),
    (".o_proj.", ".proj."),
    (".out_proj.", ".proj."),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("layer_norm", "norm"),
    ("layer_scale1.lambda1", "ls1.gamma"),
    ("layer_scale2.lambda1", "ls2.gamma"),
)
"""Parts of names of transformers and those of timm's VisionTransformer."""
WITHOUT_CLASS = {"class_token": False, "global_pool": "avg", "fc_norm": False}
TWINS = {
    "ViT": {},
    "DeiT": {"name": "deit_tiny_distilled_patch16_224"},
    "DINOv2": {"init_values": 1.0, "mlp_ratio": 4},
    "DINOv2 with registers": {"init_values": 1.0, "mlp_ratio": 4, "reg_tokens": 4},
    "SigLIP": WITHOUT_CLASS,
    "CLIP": {"pre_norm": True},
    "ViTMSN": {},
    "I-JEPA": WITHOUT_CLASS,
}
"""Arguments of the VisionTransformer with the same architecture."""


def twin(model, name="vit_tiny_patch16_224", **options):
    """timm's network with the weights of a network of transformers."""
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    network = timm.create_model(name, **{**size, "mlp_ratio": 1.5, **options}).double().eval()
    given = {}
    for key, tensor in model.state_dict().items():
        for theirs, timms in TIMMS:
            key = key.replace(theirs, timms)
        given[key] = tensor
    if "reg_token" in given:  # timm's have a position too, between that of the class token and those of the patches
        place = given["pos_embed"]
        given["pos_embed"] = torch.cat((place[:, :1], torch.zeros_like(given["reg_token"]), place[:, 1:]), 1)
    state = {}
    for key, held in network.state_dict().items():
        tensor = (
            given[key] if ".qkv." not in key else torch.cat([given[key.replace("qkv", f"{x}_proj")] for x in "qkv"])
        )
        assert tensor.numel() == held.numel(), key
        state[key] = tensor.reshape(held.shape)
    network.load_state_dict(state)
    return network


PAIRS = {f"{name}, {mechanism}": (name, mechanism) for name in TWINS for mechanism in NAMES}
QUICK_PAIRS = [pair for pair, (name, mechanism) in PAIRS.items() if mechanism == "rala" or name == "ViT"]


@pytest.mark.parametrize("pair", quick(PAIRS, QUICK_PAIRS))
def test_a_model_equals_the_swapped_twin_of_timm(pair):
    name, mechanism = PAIRS[pair]
    tiny = ARCHITECTURES[name]
    model = tiny.build(f"linvit:{mechanism}", hidden_act="gelu").double()
    gated = mechanism in ("rala", "mala", "rala_mala")
    network = linvit.swap_attention(twin(model, **TWINS[name]), mechanism, attention=AS_HERE if gated else None)
    for module in (*model.modules(), *network.modules()):
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    if name == "CLIP":  # transformers norms only the class token, after that
        network.norm = torch.nn.Identity()
    pixels = drawn(2, 3, 16, 16).double()
    read = tiny.read(model, pixel_values=pixels)
    assert_close(read, network.forward_features(pixels), rtol=1e-12, atol=1e-12)
    model.set_attn_implementation("eager")
    assert not torch.allclose(read, tiny.read(model, pixel_values=pixels), rtol=1e-4)


def attend(query, key, value, mask=None, mechanism="mala", **options):
    layer = torch.nn.Identity()
    layer.is_causal = False
    return AttentionInterface()[f"linvit:{mechanism}"](layer, query, key, value, mask, **options)[0]


@pytest.mark.parametrize("mechanism", NAMES)
def test_the_function_is_the_matrix_times_the_values(mechanism):
    query, key, value = drawn(3, 2, 4, 7, 6).double()
    expected = attention_scores(query, key, **LINEAR_AXES[mechanism]) @ value
    assert_close(attend(query, key, value, mechanism=mechanism), expected.transpose(1, 2))


def test_the_factor_of_the_logits_counts_wherever_the_model_multiplies_by_it():
    """Whisper scales its queries itself and passes 1."""
    query, key, value = drawn(3, 2, 4, 7, 6).double()
    expected = attend(query, key, value)
    assert torch.equal(attend(query, key, value, scaling=6**-0.5), expected)
    assert_close(attend(query * 6**-0.5, key, value, scaling=1.0), expected)
    assert not torch.allclose(attend(query, key, value, scaling=1.0), expected)


def test_queries_share_the_keys_of_a_group():
    query, key, value = drawn(3, 2, 4, 7, 6).double()
    shared = (x[:, :2].repeat_interleave(2, dim=1) for x in (key, value))
    assert torch.equal(attend(query, key[:, :2], value[:, :2]), attend(query, *shared))


def test_packed_sequences_attend_to_themselves_only():
    query, key, value = drawn(3, 1, 4, 7, 6).double()
    lengths = torch.tensor([0, 3, 7])
    read = attend(query, key, value, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
    parts = [attend(*(x[:, :, a:b] for x in (query, key, value))) for a, b in ((0, 3), (3, 7))]
    assert_close(read, torch.cat(parts, dim=1))


@pytest.mark.parametrize("mechanism", ["linear", "rala", "mala"])
@pytest.mark.parametrize("name", quick(TEXTS, ["BERT", "DistilBERT", "EuroBERT"]))
def test_padding_changes_nothing(name, mechanism):
    tiny = TEXTS[name]
    model = tiny.build(f"linvit:{mechanism}").double()
    short = TOKENS[1:, :3]
    alone = tiny.read(model, input_ids=short, attention_mask=torch.ones_like(short))
    assert_close(tiny.read(model)[1:, :3], alone, rtol=1e-12, atol=1e-12)
    ignored = tiny.read(model, attention_mask=torch.ones_like(TOKENS))[1:, :3]
    assert not torch.allclose(ignored, alone, rtol=1e-3)


@pytest.mark.parametrize("mechanism", ["linear", "rala", "mala"])
@pytest.mark.parametrize("name", ["SigLIP 2", "Gemma 4"])
def test_padded_patches_change_nothing(name, mechanism):
    tiny = ARCHITECTURES[name]
    model = tiny.build(f"linvit:{mechanism}").double()
    patches = 12 if name == "SigLIP 2" else 8
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in tiny.inputs().items()}
    alone = {key: x[1:, :patches] if x.ndim > 1 and x.shape[1] == 16 else x[1:] for key, x in inputs.items()}
    whole, alone = model(**inputs).last_hidden_state, model(**alone).last_hidden_state
    shown = whole[1:, :patches] if name == "SigLIP 2" else whole[-len(alone) :]
    assert_close(shown, alone, rtol=1e-12, atol=1e-12)


def bert(implementation="linvit:mala", **options):
    return TEXTS["BERT"].build(implementation, **options)


def shown(model):
    return TEXTS["BERT"].read(model)


def gemma3(implementation):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 60}
    special = {"mm_tokens_per_image": 4, "image_token_index": 50, "boi_token_index": 51, "eoi_token_index": 52}
    config = Gemma3Config(text_config=text, vision_config=IMAGE, **special)
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation=implementation).eval()


def described(model):
    ids = torch.tensor([[2, 51, 50, 50, 50, 50, 52, 7, 8]])
    pixels = drawn(1, 3, 16, 16)
    return model(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == 50).long()).logits


def of(module, name, options, part="Model"):
    return Tiny(module, f"{name}{part}", f"{name}Config", options, TEXTS["BERT"].inputs)


def train_with_dropout():
    model = bert()
    model.encoder.layer[0].attention.self.dropout.p = 0.1
    return shown(model.train())


def with_mask(*shape):
    return TEXTS["BERT"].read(bert(), attention_mask=torch.ones(shape, dtype=torch.bool).tril())


T5 = of("t5", "T5", {"vocab_size": 40, "d_model": 32, "d_kv": 16, "num_heads": 2, "num_layers": 1}, "EncoderModel")
GPT2 = of("gpt2", "GPT2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 40, **SPECIAL})
CLIP_TEXT = Tiny("clip", "CLIPTextModel", "CLIPTextConfig", {**TEXT, **SPECIAL}, TEXTS["BERT"].inputs)
MODERN = of("modernbert", "ModernBert", {**TEXT, **SPECIAL, "cls_token_id": 3, "sep_token_id": 4})
NOT_THERE = of("mpnet", "MPNet", TEXT)
REFUSALS = {
    "a causal model": (lambda: GPT2.read(GPT2.build("linvit:mala")), "GPT2Config has a causal mask or one of windows"),
    "a causal tower": (lambda: CLIP_TEXT.read(CLIP_TEXT.build("linvit:mala")), "CLIPTextConfig has a causal mask"),
    "windows": (
        lambda: MODERN.read(MODERN.build("linvit:mala")),
        "ModernBertConfig has a causal mask or one of windows",
    ),
    "the whole of Gemma 3": (lambda: described(gemma3("linvit:mala")), "'vision_config': 'linvit:mala'"),
    "a bias": (lambda: T5.read(T5.build("linvit:mala")), "T5Attention has a bias for each pair of tokens"),
    "dropout": (train_with_dropout, "BertSelfAttention drops 0.1 of its scores in training, expected 0"),
    "a mask of pairs": (lambda: with_mask(2, 1, 5, 5), "BertSelfAttention got a mask of shape (2, 1, 5, 5), expected"),
    "a mask of blocks": (lambda: with_mask(2, 5, 5), "got a mask of shape (2, 5, 5), expected one of padding"),
    "no interface": (lambda: NOT_THERE.build("linvit:mala"), "the attention of MPNetModel does not use the interface"),
    "a layer that is causal": (lambda: attend(*drawn(3, 1, 2, 5, 4), is_causal=True), "Identity is causal, expected"),
    "a cap": (lambda: attend(*drawn(3, 1, 2, 5, 4), softcap=50.0), "Identity has a cap on the scores, which"),
    "scores": (lambda: attend(*drawn(3, 1, 2, 5, 4), output_attentions=True), "is asked for scores, which it never"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_softmax_attention_alone_has_is_refused_in_one_sentence(case):
    refused, sentence = REFUSALS[case]
    with pytest.raises(SettingError, match=re.escape(sentence)) as error:
        refused()
    text = str(error.value)
    assert text.startswith("`attn_implementation` is 'linvit:mala', but ")
    assert text.endswith(".")
    assert ". " not in text


@pytest.mark.parametrize("name", ["linvit:focused", "linvit:nothing", "linvit:mala:", "linvit:mala:LX", "linvit:"])
def test_an_unknown_name_lists_those_that_are_known(name):
    with pytest.raises(
        SettingError, match=re.escape(f"is {name!r}, expected one of linvit:linear, linvit:linear_relu")
    ):
        bert(name)


def test_a_map_over_all_tokens_has_no_padding():
    with pytest.raises(ValueError, match=r"'softmax_tokens', which combines all tokens, .* accepts no `key_mask`"):
        shown(bert("linvit:efficient"))


def test_a_mask_of_queries_is_refused_by_the_operator():
    """RALA's weights need the mean of as many queries as there are keys."""
    query, key, value = drawn(3, 2, 4, 7, 6)
    mask = torch.ones(2, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match="queries"):
        attend(query[:, :, :3], key, value, mask, mechanism="rala")


def test_timm_inside_transformers_is_refused():
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args={"depth": 1})
    with pytest.raises(SettingError, match=re.escape("linvit.swap_attention for one of timm")):
        transformers.TimmWrapperModel._from_config(config, attn_implementation="linvit:mala")


def test_a_tower_is_linear_beside_a_causal_decoder(calls):
    assert described(gemma3({"vision_config": "linvit:mala"})).isfinite().all()
    assert {type(layer).__name__ for layer in calls} == {"SiglipAttention"}


def test_a_model_that_is_saved_and_loaded_again_is_linear(tmp_path):
    model = bert("linvit:rala")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "linvit:rala"
    assert torch.equal(shown(loaded), shown(model))
    softmax = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert_close(shown(softmax), shown(bert("eager")))
    softmax.save_pretrained(tmp_path / "softmax")
    assert "attn_implementation" not in json.loads((tmp_path / "softmax" / "config.json").read_text())


def test_a_model_with_one_linear_part_is_that_again(tmp_path):
    model = gemma3({"vision_config": "linvit:mala"})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    names = [config._attn_implementation for config in (loaded.config.vision_config, loaded.config.text_config)]
    assert names == ["linvit:mala", "sdpa"]
    assert torch.equal(described(loaded), described(model))
    model.set_attn_implementation({"vision_config": "eager"})
    assert "attn_implementation" not in model.config.to_dict()["vision_config"]


def test_a_whole_model_with_one_softmax_part_is_that_again():
    config = gemma3("linvit:mala").config
    config.text_config._attn_implementation = "eager"
    again = type(config)(**config.to_dict())
    assert again._attn_implementation == again.vision_config._attn_implementation == "linvit:mala"
    assert again.text_config._attn_implementation == "eager"


def test_loading_without_linvit_says_which_name_is_missing(tmp_path, monkeypatch):
    bert("linvit:rala").save_pretrained(tmp_path)
    monkeypatch.delitem(AttentionInterface._global_mapping, "linvit:rala")
    with pytest.raises(ValueError, match='attn_implementation="linvit:rala"` is not supported'):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_a_mechanism_of_ones_own_has_a_name_if_it_does_not_learn(monkeypatch):
    for table in (MECHANISMS, LINEAR_AXES, TOKEN_LAYERS):
        for name in ("cubed", "learned"):
            monkeypatch.setitem(table, name, None)  # which takes them out of the table afterwards
            del table[name]
    linvit.register_mechanism("cubed", feature_map=lambda x: x.abs() ** 3)
    linvit.register_mechanism("learned", feature_map=("relu", torch.nn.Softplus()))
    linvit.register_with_transformers()
    assert interface_names() == [f"linvit:{name}" for name in (*NAMES, "cubed")]
    query, key, value = drawn(3, 2, 4, 7, 6).double()
    expected = linvit.ops.linear_attention(query, key, value, feature_map=lambda x: x.abs() ** 3)
    assert torch.equal(attend(query, key, value, mechanism="cubed"), expected.transpose(1, 2))


@pytest.mark.parametrize("name", quick(ARCHITECTURES, ["DINOv3", "SigLIP 2", "Qwen2.5-VL", "BERT"]))
def test_a_hybrid_keeps_softmax_where_its_pattern_says_so(name, calls, tmp_path):
    tiny = ARCHITECTURES[name]
    model = tiny.build("sdpa")
    count = LAYERS.get(name, 2)
    teacher = tiny.read(model)
    student = linvit.linearize(model, "mala", "L" + "S" * (count - 1))
    read = tiny.read(student)
    assert calls == set(attention_layers(student)[:1])
    assert torch.equal(tiny.read(model), teacher)
    assert torch.equal(tiny.read(linvit.linearize(model, "mala", "S" * count)), teacher)
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path)
    assert torch.equal(tiny.read(loaded), read)


def test_swapping_is_the_name():
    model = bert("sdpa")
    assert linvit.swap_attention(model, "mala") is model
    assert (model.config._attn_implementation, model.mechanism, model.pattern) == ("linvit:mala", "mala", "LL")
    assert torch.equal(shown(model), shown(bert()))


def test_a_tower_is_swapped_inside_its_model(tmp_path):
    model = gemma3("sdpa")
    linvit.swap_attention(model.model.vision_tower, "mala", "LS")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.vision_config._attn_implementation == "linvit:mala:LS"
    assert torch.equal(described(loaded), described(model))
    assert not torch.allclose(described(model), described(gemma3("sdpa")))


@pytest.mark.parametrize("mechanism", ["rala", "mala"])
def test_a_mask_of_pairs_that_hides_keys_from_all_queries_is_one_of_keys(mechanism):
    query, key, value = drawn(3, 2, 4, 5, 6).double()
    mask = TOKENS != 1
    expected = attend(query, key, value, mask, mechanism=mechanism)
    for pairs in (mask[:, None, None], mask[:, None, None].expand(2, 4, 5, 5)):
        assert torch.equal(attend(query, key, value, pairs, mechanism=mechanism), expected)


SWAPS = {
    "options": (
        lambda: linvit.swap_attention(bert("sdpa"), "mala", attention={"lepe": False}),
        "`attention` has 'lepe'",
    ),
    "layers of its own": (lambda: linvit.linearize(bert("sdpa"), "focused"), "'focused', expected one of linear, "),
    "letters": (lambda: linvit.linearize(bert("sdpa"), "mala", "LSL"), "`pattern` is 'LSL', expected 2 letters"),
    "a model of parts": (
        lambda: linvit.linearize(gemma3("sdpa")),
        "or one of its towers, such as its `vision_tower`",
    ),
    "no interface": (lambda: linvit.linearize(NOT_THERE.build("eager")), "expected a network whose own attention uses"),
    "letters of a present model": (
        lambda: linvit.linearize(bert("sdpa"), "mala", "LS").set_attn_implementation("linvit:mala:LSL"),
        "'linvit:mala:LSL', but the model has another number of attention layers, expected one letter for each",
    ),
    "a name": (lambda: shown(bert("linvit:mala:LSL")), "has another number of attention layers, expected one letter"),
}


@pytest.mark.parametrize("case", SWAPS)
def test_what_cannot_be_swapped_says_so(case):
    refused, sentence = SWAPS[case]
    with pytest.raises(SettingError, match=re.escape(sentence)):
        refused()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["rala", "mala"])
def test_a_model_compiles_as_one_graph(mechanism):
    model = bert(f"linvit:{mechanism}")
    assert_close(shown(torch.compile(model, fullgraph=True)), shown(model))


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()


def test_importing_linvit_does_not_import_transformers():
    assert python("import sys, linvit; print('transformers' in sys.modules)") == ["False"]


@pytest.mark.slow
def test_importing_linvit_after_transformers_registers():
    code = "import transformers, linvit; print('linvit:mala' in transformers.AttentionInterface())"
    assert python(code) == ["True"]
