"""Which values Lightning's trainer takes in a run; Lightning itself meets a wrong one late, or not at all."""

from collections.abc import Sequence
from typing import Annotated, Any

from linvit.ranges import Amount, Count, OneOf, Range

Steps = Count | Annotated[int, OneOf((-1,))]
Batches = Count | Annotated[float, Range(above=0, most=1)]
BatchesOrNone = Amount | Annotated[float, Range(0, 1)]

RANGES: dict[str, Any] = {
    "accumulate_grad_batches": Count,
    "check_val_every_n_epoch": Count | None,
    "devices": Count | Sequence[Amount] | str,
    "fast_dev_run": Amount | bool,
    "gradient_clip_algorithm": Annotated[str, OneOf(("norm", "value"))] | None,
    "gradient_clip_val": Annotated[float, Range(0)] | None,
    "limit_predict_batches": BatchesOrNone | None,
    "limit_test_batches": BatchesOrNone | None,
    "limit_train_batches": Batches | None,
    "limit_val_batches": BatchesOrNone | None,
    "log_every_n_steps": Amount | None,
    "max_epochs": Count | None,
    "max_steps": Steps,
    "min_epochs": Amount | None,
    "min_steps": Amount | None,
    "num_nodes": Count,
    "num_sanity_val_steps": Annotated[int, Range(-1)] | None,
    "overfit_batches": BatchesOrNone,
    "reload_dataloaders_every_n_epochs": Amount,
    "val_check_interval": Batches | str | None,
}
