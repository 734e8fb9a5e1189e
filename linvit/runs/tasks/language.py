"""Runs of decoders: language models, and networks trained on synthetic sequences."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

from linvit.analysis.figures import WIDTH, subplots
from linvit.analysis.report import figure_image, paragraph, preformatted, table
from linvit.data.source import Source
from linvit.data.text.files import Stdlib, TextFolder
from linvit.data.text.hub import HuggingFaceText
from linvit.data.text.recall import Copy, Recall, RecallPreprocessing
from linvit.data.text.source import TextPreprocessing
from linvit.data.text.tokens import Tokenizer, decoded_after
from linvit.errors import SettingError
from linvit.layers.mechanisms import at
from linvit.models.by_name import create
from linvit.models.sequence import SIZES, Decoder, DecoderCache, generate
from linvit.ranges import Count, Range, check_names, checked
from linvit.runs.evaluate import HarnessMeasures, Measures
from linvit.runs.report import Section
from linvit.runs.run import NamedRun
from linvit.tasks.language import IGNORED, Language
from linvit.tasks.language import Recall as RecallTask

VOCABULARIES = {"sequence_nano": 257, "sequence_340m": 32_000}
CONTEXT = 2048
POINTS = 32
READ, PIECE = 256, 37  # tokens
PROMPTS = ("", "def ", "import ")
LENGTH, TEMPERATURE, TOP_P = 300, 0.8, 0.95


class DecoderRun(NamedRun):
    """A run of a token decoder."""

    family = "sequence"
    names_classes = False
    listing_caption = (
        f"memory: cache of one sequence after {CONTEXT:,} tokens, float32; for softmax it grows with the tokens"
    )

    def facts(self, source: Source) -> tuple[str, ...]:
        return (f"data: {cast(RecallPreprocessing, source.preprocessing).corpus}",)

    def sections(self, source: Source) -> list[Section]:
        placed, device = self.placed_network()
        network = cast(Decoder, placed)
        figure = position_figure(*bits_by_position(network, source, device))
        by_position = "Bits per token by position", [figure_image(figure, "bits per token by position in the row")]
        if not isinstance(network, Decoder):
            return [by_position]  # an exported file has one form
        tokens = next(iter(source.val_dataloader()))[0][:1, :READ].to(device)
        rows = []
        for dtype in (torch.float32, torch.float64):
            differences = distances(deepcopy(network).to(dtype), tokens)
            arithmetic = {"arithmetic": str(dtype).removeprefix("torch.")}
            rows.append(arithmetic | {name: f"{value:.0e}" for name, value in differences.items()})
        words = (
            "Largest difference of a logit from a single pass over the row, relative to the largest logit; one"
            " document."
        )
        return [by_position, ("The same row, computed in other ways", [table(rows), paragraph(words)])]

    @classmethod
    def listing(cls) -> Iterator[dict[str, Any]]:
        """Decoders with each mechanism: name, mechanism, vocabulary, parameters, memory (bytes of the state after
        CONTEXT tokens, float32), grows (whether this depends on the tokens)."""
        for name in SIZES:
            for mechanism, entry in at("sequences").items():
                memory = DecoderCache()
                with torch.device("meta"):
                    network = create(name, VOCABULARIES[name], mechanism=mechanism)
                    cast(Decoder, network).read(torch.zeros(1, CONTEXT, dtype=torch.long), memory)
                yield {
                    "name": name,
                    "mechanism": mechanism,
                    "vocabulary": VOCABULARIES[name],
                    "parameters": sum(parameter.numel() for parameter in network.parameters()),
                    "memory": memory.num_bytes(),
                    "grows": entry.axes is None,
                }


class LanguageRun(DecoderRun):
    """A run of a language model."""

    task_name = "language"
    task_class = Language
    sources: ClassVar = {"stdlib": Stdlib, "textfolder": TextFolder, "huggingface": HuggingFaceText}
    folder_source = "textfolder"
    preprocessing_class = TextPreprocessing

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        trained_on = (self.recipe or {}).get("data") or {}
        read = {key: getattr(self.preprocessing, key) for key in ("tokenizer", "separator", "context")}
        read |= {key: trained_on[key] for key in ("keeps_apart",) if key in trained_on}
        if name == "textfolder" and "root" in changes:
            stored = stored | {"held_out": 1.0}
        return self.create_source(name, read | stored | changes)

    @checked
    def evaluate(  # type: ignore[override] # tasks of the harness have measures of their own
        self,
        data: str | Path | None = None,
        progress: bool = False,
        trainer: Mapping[str, Any] | None = None,
        *,
        tasks: Sequence[str] | None = None,
        task_data: str | Path | None = None,
        include: str | Path | None = None,
        limit: Count | None = None,
        **overrides: Any,
    ) -> Measures | HarnessMeasures:
        """Loss and bits of the held-out text, or with `tasks` their measures in EleutherAI's lm-evaluation-harness.

        Args:
            data, overrides: see `source`; with `tasks`, overrides are batch_size (texts per batch, 16) and weights
                ("raw" or "ema").
            progress: show a progress bar in the terminal.
            trainer: arguments of Lightning's Trainer, such as devices and precision.
            tasks: names of tasks, tags or groups of the harness.
            task_data: folder with the tasks' data, instead of downloading it.
            include: folder with your own tasks, used instead of the harness's.
            limit: items per task.
        """
        if tasks is None:
            for name, value in {"task_data": task_data, "include": include, "limit": limit}.items():
                if value is not None:
                    raise SettingError(f"`{name}` needs `tasks`: add tasks, or leave `{name}` out.")
            return super().evaluate(data, progress, trainer, **overrides)
        from linvit.runs.harness import evaluate_tasks  # the harness, which most processes never need

        if data is not None:
            raise SettingError("`tasks` have their own data: leave `data` out.")
        check_names("option of tasks", overrides, ("batch_size", "weights"))
        return evaluate_tasks(
            self, tasks=tasks, task_data=task_data, include=include, limit=limit, progress=progress, **overrides
        )

    @checked
    def generate(
        self,
        *,
        prompt: str = "",
        tokens: Count = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: Annotated[int, Range(0, 2**63 - 1)] = 0,
        weights: str | None = None,
    ) -> Iterator[str]:
        """Yields the prompt and its continuation, until the document ends or `tokens` are generated.

        Args:
            prompt: the beginning of the text. Networks on bytes also read bytes that are not UTF-8 (surrogates in
                Python).
            tokens: the most tokens to generate.
            temperature: sampling temperature; 0 always takes the most likely token.
            top_p: nucleus sampling: keep the most likely tokens up to this total probability.
            seed: random seed.
            weights: "raw" or "ema"; default: the moving average, if there is one.
        """
        network, device = self.placed_network(weights)
        tokenizer = self.preprocessing.open()
        try:
            start = prompt.encode("utf-8", "surrogateescape")  # the bytes that the shell passed
        except UnicodeEncodeError as error:
            half = ascii(prompt[error.start])
            raise SettingError(f"`prompt` has {half}, half of a surrogate pair, not a character: remove it.") from error
        before = tokenizer.encode(start)
        context = torch.tensor([tokenizer.separator, *before], device=device)
        generator = torch.Generator().manual_seed(seed)
        continuation = generate(
            cast(Decoder, network), context, tokens, temperature, top_p, generator, stop=tokenizer.separator
        )
        return itertools.chain([start.decode("utf-8", "replace")], pieces(tokenizer, continuation, before))

    def sections(self, source: Source) -> list[Section]:
        samples = []
        for seed, prompt in enumerate(PROMPTS):
            text = "".join(self.generate(prompt=prompt, tokens=LENGTH, temperature=TEMPERATURE, top_p=TOP_P, seed=seed))
            begin = f"after {prompt!r}" if prompt else "from the start of a document"
            words = f"{begin}, temperature {TEMPERATURE}, top-p {TOP_P}, seed {seed}:"
            samples += [paragraph(words), preformatted(text)]
        return [*super().sections(source), ("Generated text", samples)]


class RecallRun(DecoderRun):
    """A run of a decoder trained on generated sequences, and measured on some of the tokens only."""

    task_name = "recall"
    task_class = RecallTask
    sources: ClassVar = {"recall": Recall, "copy": Copy}
    folder_source = "recall"
    preprocessing_class = RecallPreprocessing

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        if "root" in changes:
            raise SettingError("`root` is a folder, but the sequences of this run are synthetic: leave it out.")
        return super().open_source(name, stored, changes)


def pieces(tokenizer: Tokenizer, tokens: Iterator[int], before: Sequence[int] = ()) -> Iterator[str]:
    """Yields the text of tokens as they arrive; a character made of several tokens is yielded when it is complete.

    before: the tokens of the prompt, which is not yielded.
    """
    shown = list(before)  # later the tokens of the last piece
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = decoded_after(tokenizer, shown, held)
        if not text.endswith("�"):
            yield text
            shown, held = held, []
    yield decoded_after(tokenizer, shown, held)


@torch.inference_mode()
def bits_by_position(network: Decoder, source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean bits per validation target at each position of a row, and their counts; both (context,)."""
    bits = counts = torch.zeros(())
    for tokens, targets in source.val_dataloader():
        wanted = targets["targets"].to(device)
        logits = network(tokens.to(device), targets["documents"].to(device)).float()
        nats = cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none")
        bits = bits + nats.view_as(wanted).double().sum(0).cpu() / torch.log(torch.tensor(2.0))
        counts = counts + (wanted != IGNORED).sum(0).cpu()
    return bits / counts.clamp_min(1), counts


def position_figure(bits: Tensor, counts: Tensor) -> Figure:
    """Mean bits per token over the position in the row, averaged over neighbours, on a logarithmic axis."""
    positions = torch.arange(1, len(bits) + 1)
    edges = torch.logspace(0, torch.log10(torch.tensor(float(len(bits) + 1))), POINTS).round().unique()
    middle, mean = [], []
    for low, high in itertools.pairwise(edges.tolist()):
        group = (counts > 0) & (positions >= low) & (positions < high)
        if group.any():
            weights = counts[group].double()
            middle.append(float((positions[group] * weights).sum() / weights.sum()))
            mean.append(float((bits[group] * weights).sum() / weights.sum()))
    figure, axes = subplots((WIDTH, 3))
    axes.plot(middle, mean, marker="o", color="#0072B2")
    axes.set(xlabel="position in the row", ylabel="bits per token", xscale="log")
    return figure


@torch.inference_mode()
def distances(network: Decoder, tokens: Tensor) -> dict[str, float]:
    """Relative distance of the logits of tokens (1, tokens) from the chunked form, for other ways to compute them."""

    def in_pieces(length: int) -> Tensor:
        memory = DecoderCache()
        return torch.cat([network.read(piece, memory) for piece in tokens.split(length, dim=1)], dim=1)

    whole = network(tokens)
    ways = {
        "explicit matrix": network(tokens, form="matrix"),
        f"in pieces of {PIECE} tokens": in_pieces(PIECE),
        "token by token": in_pieces(1),
    }
    return {name: float((logits - whole).abs().max() / whole.abs().max()) for name, logits in ways.items()}
