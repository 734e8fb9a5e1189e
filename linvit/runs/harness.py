"""A language model under EleutherAI's lm-evaluation-harness.

A task's data is downloaded from the Hugging Face hub unless it is local: see linvit.data.text.benchmarks.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import lm_eval.tasks
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows
from torch import nn

from linvit.data.text.benchmarks import BENCHMARKS, read_benchmark
from linvit.data.text.tokens import decoded_after
from linvit.errors import SettingError, refuse
from linvit.models.sequence import Decoder, generate
from linvit.ranges import Count, checked, lookup
from linvit.runs.evaluate import HarnessMeasures
from linvit.runs.progress import tracked
from linvit.runs.trained import Trained

LONGEST_ANSWER = 256
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names in tasks, the first counts


class Harness(TemplateLM):
    """A decoder behind the harness's interface: every text begins a document, and contexts are never truncated.

    Args:
        run: a run of the task language.
        batch_size: texts per batch, padded on the right, which causal attention does not see.
        weights: "raw" or "ema"; default: the moving average, if there is one.
        progress: show how many batches of texts are done.

    Rolling likelihoods use windows of the context length of training, as for other networks.
    """

    def __init__(self, run: Trained, batch_size: int = 16, weights: str | None = None, progress: bool = False) -> None:
        super().__init__()
        self.network: nn.Module
        self.network, self.place = run.placed_network(weights)
        self.text = run.preprocessing.open()
        self.context = run.preprocessing.context
        self.batch_size, self.progress = batch_size, progress

    @property
    def eot_token_id(self) -> int:
        return int(self.text.separator)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return list(self.text.encode(string.encode("utf-8", "replace")))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        begun, rest = super()._encode_pair(context, continuation)
        return self._from_start(begun), rest

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.eot_token_id, self.context, 1)
            pieces = []
            for context, rest in windows:  # the context may contain all but the last token of the continuation
                together = [*context, rest[-1]]
                pieces.append(("", together[: len(together) - len(rest)], list(rest)))
            totals.append(sum(likelihood for likelihood, _ in self._loglikelihood_tokens(pieces)))
        return totals

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy decoding) of each continuation in (_, context, continuation)."""
        answers: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda index: -sum(map(len, requests[index][1:])))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        for places in tracked(batches, "Reading batches of texts", progress=self.progress):
            rows = [[*requests[index][1], *requests[index][2]] for index in places]
            longest = max(map(len, rows))
            padded = [[*row, *[self.eot_token_id] * (longest - len(row))] for row in rows]
            logits = self.network(torch.tensor(padded, device=self.place)).float().log_softmax(-1).cpu()
            for index, row, likely in zip(places, rows, logits, strict=True):
                count = len(requests[index][2])
                wanted = torch.tensor(row[len(row) - count :])
                predicted = likely[len(row) - count - 1 : len(row) - 1]
                total = predicted.gather(-1, wanted[:, None]).double().sum().item()
                answers[index] = total, bool((predicted.argmax(-1) == wanted).all())
        return [answers[index] for index in range(len(requests))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._written(*request.args) for request in requests]

    def _written(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
        context_tokens = self._from_start(self.tok_encode(context))
        prompt = torch.tensor(context_tokens, device=self.place)
        most = next((int(settings[name]) for name in LIMITS if settings.get(name) is not None), LONGEST_ANSWER)
        generator = torch.Generator().manual_seed(0)
        top_p = settings.get("top_p", 1.0)
        tokens: list[int] = []
        text = ""
        network = cast(Decoder, self.network)
        for token in generate(network, prompt, most, temperature, top_p, generator, self.eot_token_id):
            tokens.append(token)
            text = decoded_after(self.text, context_tokens, tokens)
            if any(stop in text for stop in stops):
                break
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[: min(ends)] if ends else text

    def _from_start(self, tokens: Sequence[int]) -> list[int]:
        begun = bool(tokens) and tokens[0] == self.eot_token_id
        return list(tokens) if begun else [self.eot_token_id, *tokens]


@checked
def evaluate_tasks(
    run: Trained,
    *,
    tasks: Sequence[str],
    task_data: str | Path | None = None,
    include: str | Path | None = None,
    limit: Count | None = None,
    batch_size: Count = 16,
    weights: str | None = None,
    progress: bool = False,
) -> HarnessMeasures:
    """Evaluates tasks of the harness; a tag or group stands for all of its tasks.

    task_data: a folder with the data of the tasks, which must be in BENCHMARKS; nothing is downloaded. include: a
    folder with your own tasks, used instead of the harness's. limit: items per task.
    """
    refuse(
        include is not None
        and not Path(include).is_dir()
        and f"`include` is {include}, expected a folder with .yaml files of tasks: give one.",
        include is not None
        and task_data is not None
        and "`task_data` has data for the harness's own tasks: leave `include` out, or `task_data`.",
    )
    with tempfile.TemporaryDirectory() as folder:
        if task_data is not None:
            include = folder
            for task in dict.fromkeys(tasks):
                lookup("tasks", task, BENCHMARKS)
                _write_local_task(task, read_benchmark(task, task_data), Path(folder))
        model = Harness(run, batch_size, weights, progress)
        manager = TaskManager(include_path=include, include_defaults=include is None)
        unknown = [name for name in tasks if name not in manager.all_tasks]
        if unknown:
            raise SettingError(
                f"The harness has no task {unknown[0]!r}: `lm-eval ls tasks` lists its tasks, and `include` accepts a"
                " folder with your own."
            )
        measured = simple_evaluate(model, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0)
    results = {}
    for task, measures in measured["results"].items():  # each sample counts once
        choices = {sample["doc_id"]: len(sample["resps"]) for sample in measured["samples"].get(task, [])}.values()
        chance = fmean(1 / count for count in choices) if choices and min(choices) > 1 else None
        results[task] = dict(measures) | {"items": len(choices), "chance": chance}
    return HarnessMeasures(results)


def _write_local_task(task: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Writes the data as JSON lines, and the harness's definition of the task with this data in place of the hub's."""
    benchmark, data = BENCHMARKS[task], folder / f"{task}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    definition = {
        "include": str(Path(lm_eval.tasks.__file__).parent / benchmark.definition),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {benchmark.split: str(data)}, "cache_dir": str(folder / "cache")},
        **{
            f"{split}_split": split if split == benchmark.split else None
            for split in ("training", "validation", "test")
        },
    }
    (folder / f"{task}.yaml").write_text(yaml.safe_dump(definition))
