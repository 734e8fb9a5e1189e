"""The designs of trainings for GPUs, as data; docs/evidence/referee.md and docs/evidence/trainings.md explain them.

A design is fixed before its first run: what is here decides what runs, with which seeds, and what is claimed.
"""

from evidence.design import LADDER, Design, Primary

TABLE_9 = "MALA, Table 9, DeiT-T with MALA"
MHLA, VITTT = "MHLA (ICLR 2026), Table 2, DeiT-T with MHLA", "ViT³, repository, ViT³-T"
RALA, SOFTMAX = "RALA, Table 8, DeiT-T with RALA", "MALA, Table 9, DeiT-T"
RAVLT, MAVIT = "RALA, Table 9, RAVLT-T", "MALA, Table 11, MAViT-T"
CARE_S0 = "CARE, Table 4, CARE-S0"

CROSSED = ("mala", "mala_blocks", "rala", "rala_blocks")
CLAIMED = (*CROSSED, "rala_uniform", "softmax_gated", "mhla", "vittt")

REFEREE = Design(
    "referee",
    data="cifar",
    images=50_000,
    seeds=(
        ((*CLAIMED, "softmax", "linear", "nala"), range(100, 104)),
        (CLAIMED, range(104, 108)),
        (CLAIMED, range(108, 112)),
        (CLAIMED, range(112, 116)),
        (CROSSED, range(116, 120)),
    ),
    swept=LADDER[2:7],
    ladder=LADDER[:-1],
    sweep_epochs=10,
    shown=(3, 10),
    pace=((25_000, 30), (12_000, 20), (0, 10)),
    assumed=45_000,
    claims=(
        Primary(("mala_blocks", "mala"), 1.0, alone=True),
        Primary(("rala_blocks", "rala")),
        Primary(("mala", "softmax_gated"), source=f"{TABLE_9}; {SOFTMAX}"),
        Primary(("mala", "rala_uniform"), source="MALA, Section 3.3, without a number"),
        Primary(("rala", "rala_uniform"), source="RALA, Table 9, in a pyramid"),
        Primary(("mhla", "mala"), source=f"{MHLA}; {TABLE_9}"),
        Primary(("vittt", "mala"), source=f"{VITTT}; {TABLE_9}"),
        Primary(("mala_blocks", "mhla")),
    ),
)

PUBLISHED_PYRAMIDS = ("rala_llss", "uniform_llss", "mala_llss", "softmax")
PATTERNS = Design(
    "patterns",
    data="imagenette-128",
    images=9_469,
    seeds=(
        (
            (*PUBLISHED_PYRAMIDS, "ungated_llss", "relu_llss", "rala_llll", "uniform_llll", "mala_llll", "relu_llll"),
            range(120, 124),
        ),
        (PUBLISHED_PYRAMIDS, range(124, 132)),
    ),
    swept=LADDER[2:7],
    sweep_epochs=10,
    held_out=("data.root=data/imagenette-128/train", "data.held_out=0.1"),
    shown=(5, 15),
    pace=((15_000, 45), (8_000, 30), (0, 15)),
    assumed=20_000,
    claims=(
        Primary(("rala_llss", "uniform_llss"), source=f"{RAVLT}; RALA, Table 9, w/o KV aug"),
        Primary(("mala_llss", "rala_llss"), source=f"{MAVIT}; {RAVLT}"),
        Primary(("rala_llss", "softmax"), source="nothing published for SSSS"),
    ),
    workers=10,
    ahead=6,
)

OTHERS = ("equal_interaction2", "symmetric", "attended", "early_linear", "local3", "local7")
REMOVED = ("removed_interaction1", "removed_interaction2", "removed_memory")
EQUAL = ("equal_interaction1", "equal_memory")
PARTS = Design(
    "parts",
    data="imagenette-128",
    images=9_469,
    seeds=(
        (("care", *REMOVED, *EQUAL, *OTHERS), range(140, 146)),
        (("care", *REMOVED, *EQUAL), range(146, 154)),
    ),
    swept=LADDER[3:8],
    sweep_epochs=10,
    held_out=("data.root=data/imagenette-128/train", "data.held_out=0.1"),
    shown=(5, 10),
    pace=((20_000, 30), (10_000, 20), (0, 10)),
    assumed=25_000,
    claims=(
        Primary(("care", "removed_interaction1"), source=f"{CARE_S0}; CARE, Table 4, w/o Inter1"),
        Primary(("care", "removed_interaction2"), source=f"{CARE_S0}; CARE, Table 4, w/o Inter2"),
        Primary(("care", "removed_memory"), source=f"{CARE_S0}; CARE, Table 4, w/o Mem"),
        Primary(("care", "equal_interaction1")),
        Primary(("care", "equal_memory")),
    ),
    within=1.0,
    workers=12,
    ahead=6,
)

SCALE = Design(
    "scale",
    data="tiny-imagenet-100",
    images=50_000,
    seeds=((("softmax_gated", "rala_uniform", "rala", "mala"), range(160, 162)),),
    swept=LADDER[2:7],
    sweep_epochs=4,
    held_out=("data.root=data/tiny-imagenet-100/train", "data.held_out=0.1"),
    shown=(4, 8),
    pace=((10_000, 24), (6_000, 16), (0, 8)),
    assumed=12_000,
    workers=8,
    ahead=2,
)

DESIGNS = {design.name: design for design in (REFEREE, PATTERNS, PARTS, SCALE)}
