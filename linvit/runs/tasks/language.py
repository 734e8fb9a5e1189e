"""Runs of language models."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import torch

from linvit.analysis.report import paragraph, preformatted
from linvit.data.source import Source
from linvit.data.text.files import Stdlib, TextFolder
from linvit.data.text.hub import HuggingFaceText
from linvit.data.text.source import TextPreprocessing
from linvit.data.text.tokens import Tokenizer, decoded_after
from linvit.errors import SettingError
from linvit.models.sequence import Decoder, generate
from linvit.ranges import Count, Range
from linvit.runs.decoders import DecoderSpec
from linvit.runs.spec import Section, check_options
from linvit.tasks.language import Language

if TYPE_CHECKING:
    from linvit.runs.run import Run

PROMPTS = ("", "def ", "import ")
LENGTH, TEMPERATURE, TOP_P = 300, 0.8, 0.95


class LanguageSpec(DecoderSpec):
    """Language modelling with decoders."""

    name = "language"
    task = Language
    sources: ClassVar = {"stdlib": Stdlib, "textfolder": TextFolder, "huggingface": HuggingFaceText}
    folder_source = "textfolder"
    preprocessing = TextPreprocessing

    def open_source(self, run: "Run", name: str, stored: dict[str, Any], given: dict[str, Any]) -> Source:
        trained_on = (run.recipe or {}).get("data") or {}
        read = {key: getattr(run.preprocessing, key) for key in ("tokenizer", "separator", "context")}
        read |= {key: trained_on[key] for key in ("keeps_apart",) if key in trained_on}
        if name == "textfolder" and "root" in given:
            stored = stored | {"held_out": 1.0}
        return self.create_source(name, read | stored | given)

    def evaluate(self, run: "Run", data: str | Path | None, progress: bool, trainer: Any, **options: Any) -> Any:
        """As for every task; with `tasks`, runs tasks of EleutherAI's lm-evaluation-harness with the options

        task_data: folder with the tasks' data, instead of downloading it. include: folder with your own tasks, used
        instead of the harness's. limit: items per task. batch_size: texts per batch. weights: "raw" or "ema".
        """
        if options.get("tasks") is None:
            for name in ("task_data", "include", "limit"):
                if name in options:
                    raise SettingError(f"`{name}` needs `tasks`: add tasks, or leave `{name}` out.")
            return super().evaluate(run, data, progress, trainer, **options)
        from linvit.runs.harness import evaluate_tasks

        if data is not None:
            raise SettingError("`tasks` have their own data: leave `data` out.")
        check_options(evaluate_tasks, self.name, options)
        return evaluate_tasks(run, progress=progress, **options)

    def generate(
        self,
        run: "Run",
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
        network, device = run.placed_network(weights)
        tokenizer = run.preprocessing.open()
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

    def sections(self, run: "Run", source: Source) -> list[Section]:
        samples = []
        for seed, prompt in enumerate(PROMPTS):
            text = "".join(
                self.generate(run, prompt=prompt, tokens=LENGTH, temperature=TEMPERATURE, top_p=TOP_P, seed=seed)
            )
            begin = f"after {prompt!r}" if prompt else "from the start of a document"
            words = f"{begin}, temperature {TEMPERATURE}, top-p {TOP_P}, seed {seed}:"
            samples += [paragraph(words), preformatted(text)]
        return [*super().sections(run, source), ("Generated text", samples)]


SPEC = LanguageSpec()


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
