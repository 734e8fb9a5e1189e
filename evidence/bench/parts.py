"""The benchmarks of our pages: name of the part, its page, and the words after `python -m evidence bench`.

They need a quiet machine; PARTS take about half an hour.
"""

from evidence.rows import Bench

OPERATOR, NETWORK, TRAINING = "benchmarks-operator", "benchmarks-networks", "benchmarks-training"
DEPLOYMENT, LINEAR = "deployment", "linearize"
WITH_KERNEL = "--variants plain reference fused fused+cpp"
SMALL_PEERS = "efficientvit_b1 mobilenetv4_conv_medium"
PEERS_IN_8 = (
    "convnext_tiny deit_small_patch16_224 swin_tiny_patch4_window7_224 efficientvit_b1 fastvit_t8"
    " mobilenetv4_conv_medium"
)
# Writing the files takes longer than measuring them: about ten minutes per runtime.
ON_DEVICES = (
    f"model ravlt_tiny mavit_tiny care_s0 care_s1 --peers {SMALL_PEERS} fastvit_t8 repvit_m1_0 shvit_s3"
    " deit_small_patch16_224 convnext_tiny --rounds 11 --memory --variants {0} --peer-variants {0}"
)
BESIDE_DEIT = "--peers deit_tiny_patch16_224 --sizes 224 512 1024 2048 --rounds 5 --memory"
GPU_OP = (
    "op rala mala --device cuda --dtypes bfloat16 --batch 64 --heads 8 --tokens 3136 12544"
    " --variants plain triton reference --memory --rounds 7 --seconds 2"
)
PARTS = (
    ("op", OPERATOR, "op --variants plain cpp reference sdpa --memory --rounds 7 --seconds 90"),
    ("op_own", OPERATOR, "op rala mala --variants plain cpp reference sdpa --layout own --rounds 7 --seconds 60"),
    (
        "op_backward",
        OPERATOR,
        "op --variants plain cpp reference sdpa --backward --tokens 784 3136 12544 --memory --rounds 5 --seconds 60",
    ),
    ("model", NETWORK, f"model {WITH_KERNEL} --rounds 9 --seconds 90 --memory"),
    ("model_threads", NETWORK, f"model {WITH_KERNEL} --batch 1 8 --threads 2 --peers --rounds 9 --seconds 90"),
    ("model_batch8", NETWORK, f"model {WITH_KERNEL} --batch 8 --rounds 7 --seconds 150 --peers {PEERS_IN_8}"),
    (
        "model_kept",
        NETWORK,
        f"model {WITH_KERNEL} --batch 8 --peers convnext_tiny {SMALL_PEERS} --rounds 7 --seconds 90 --keep-memory",
    ),
    (
        "model_bf16",
        NETWORK,
        "model --variants plain reference bf16 fused+bf16 fused+cpp+bf16 --peers deit_small_patch16_224 convnext_tiny"
        " --peer-variants plain bf16 --batch 1 8 --rounds 5 --seconds 60",
    ),
    (
        "resolution",
        NETWORK,
        "model ravlt_tiny ravlt_tiny_linear --variants plain fused+cpp --peers swin_tiny_patch4_window7_224"
        " --peer-variants plain --sizes 224 512 1024 1024x2048 --rounds 5 --seconds 60 --memory",
    ),
    (
        "linearize",
        LINEAR,
        f"model deit_tiny_linear deit_tiny_rala deit_tiny_mala --variants plain fused+cpp {BESIDE_DEIT}"
        " --peer-variants plain --seconds 60",
    ),
    (
        "train",
        TRAINING,
        "train --variants plain reference channels_last+fused_adamw channels_last+fused_adamw+cpp checkpointing"
        " --rounds 5 --seconds 60 --memory",
    ),
    (
        "curves",
        TRAINING,
        "curves --seconds 10",
    ),
)
DEPLOYED = (
    ("onnxruntime", DEPLOYMENT, ON_DEVICES.format("onnxruntime onnxruntime+int8")),
    ("openvino", DEPLOYMENT, ON_DEVICES.format("openvino openvino+bf16 openvino+int8")),
    ("executorch", DEPLOYMENT, ON_DEVICES.format("executorch executorch+int8")),
)
COMPILED = (
    ("compiled", NETWORK, "model ravlt_tiny --variants plain fused frozen fused+frozen --peers --batch 8 --rounds 5"),
)
ON_GPU = (
    ("gpu_op", OPERATOR, GPU_OP),
    ("gpu_op_backward", OPERATOR, f"{GPU_OP} --backward"),
    (
        "gpu_softmax",
        OPERATOR,
        "op rala mala linear --device cuda --dtypes bfloat16 --batch 8 --tokens 49 196 784 3136 12544"
        " --variants plain triton sdpa --memory --rounds 7 --seconds 1",
    ),
    (
        "gpu_model",
        NETWORK,
        "model --device cuda --variants plain fused fused+bf16 fused+bf16+triton --peers deit_small_patch16_224"
        " convnext_tiny swin_tiny_patch4_window7_224 --peer-variants plain bf16 --batch 64 --memory --rounds 5"
        " --seconds 4",
    ),
    (
        "gpu_train",
        TRAINING,
        "train ravlt_small_linear --device cuda --variants plain reference bf16 bf16+triton --batch 64 --memory"
        " --rounds 3 --seconds 4",
    ),
    (
        "gpu_linearize",
        LINEAR,
        f"model deit_tiny_linear deit_tiny_mala --device cuda --variants fused+bf16 fused+bf16+triton {BESIDE_DEIT}"
        " --peer-variants bf16 --seconds 2",
    ),
)


def measured(parts: tuple[tuple[str, str, str], ...]) -> tuple[Bench, ...]:
    """The rows of the table for these parts."""
    return tuple(Bench(f"bench-{name}", words, page) for name, page, words in parts)
