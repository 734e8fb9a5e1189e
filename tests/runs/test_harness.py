import json

import pytest
import torch
from benchmark_files import HELLASWAG, LAMBADA, PIQA, PIQA_LABELS, WINOGRANDE, write_benchmarks
from tiny_language import write_language_recipe

from linvit.runs import train

pytest.importorskip("lm_eval", reason="the extra `language` is not installed")
ITEMS = [
    {"begin": "The number 3 comes before", "ends": [" 4;", " 9;"], "right": 0},
    {"begin": "its square is ", "ends": ["of 5", "25.", "7"], "right": 1},
    {"begin": "", "ends": ["The number", "number The"], "right": 0},
]
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
tag: my_tag
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(write_language_recipe(tmp_path_factory.mktemp("harness"), trainer={"max_epochs": 1}))


@pytest.fixture(scope="module")
def harness(run):
    from linvit.runs.harness import Harness

    return Harness(run, batch_size=2)


class Request:
    def __init__(self, *args):
        self.args = args


def likelihood(harness, context, rest):
    """Token by token, each from a row of its own; the harness moves a context's last spaces to what follows."""
    context, rest = context.rstrip(), context[len(context.rstrip()) :] + rest
    tokens = [256, *context.encode(), *rest.encode()]
    total, greedy = 0.0, True
    with torch.no_grad():
        for place in range(len(tokens) - len(rest.encode()), len(tokens)):
            given = harness.network(torch.tensor([tokens[:place]]))[0, -1].double().log_softmax(-1)
            total += float(given[tokens[place]])
            greedy &= int(given.argmax()) == tokens[place]
    return total, greedy


def test_likelihoods_are_those_by_brute_force(harness):
    pairs = [(item["begin"], end) for item in ITEMS for end in item["ends"]]
    likelihoods = harness.loglikelihood([Request(*pair) for pair in pairs], disable_tqdm=True)
    for pair, (total, greedy) in zip(pairs, likelihoods, strict=True):
        expected = likelihood(harness, *pair)
        assert total == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]


def test_rolling_likelihood_reads_pieces_of_the_training_s_context(harness):
    text = "The number 3 comes before 4; its square is 9. And so on, beyond the context."
    tokens = [256, *text.encode()]
    expected = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 40):
            row = tokens[start : start + 41]
            if len(row) < 41 and start:  # the last piece sees as much as the others
                row = tokens[-41:]
            given = harness.network(torch.tensor([row[:-1]]))
            expected += _of_last(given[0].double(), row, len(tokens[start + 1 : start + 41]))
    assert harness.loglikelihood_rolling([Request(text)]) == [pytest.approx(expected, abs=1e-3)]


def _of_last(logits, row, count):
    likely = logits.log_softmax(-1)[len(logits) - count :]
    return float(likely.gather(-1, torch.tensor(row[-count:])[:, None]).sum())


def test_a_whole_local_task_gives_the_accuracy_by_brute_force(run, harness, tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text("\n".join(json.dumps(item) for item in ITEMS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "items.yaml").write_text(CHOICE.format(name="three_items", file=file, cache=tmp_path / "cache"))
    measured = run.evaluate(tasks=["three_items"], include=tasks)
    right = normed = 0
    for item in ITEMS:
        totals = [likelihood(harness, item["begin"], end)[0] for end in item["ends"]]
        right += max(range(len(totals)), key=totals.__getitem__) == item["right"]
        shares = [total / len(end) for total, end in zip(totals, item["ends"], strict=True)]
        normed += max(range(len(shares)), key=shares.__getitem__) == item["right"]
    assert measured["three_items"]["acc,none"] == pytest.approx(right / 3)
    assert measured["three_items"]["acc_norm,none"] == pytest.approx(normed / 3)
    assert measured.by_weights == dict(measured)
    acc = {"task": "three_items", "measure": "acc", "value": f"{right / 3:.4f}", "chance": "0.4444", "items": "3"}
    assert acc in measured.table()
    assert run.evaluate(tasks=["my_tag"], include=tasks) == measured


def test_local_benchmarks_need_no_network_and_score_as_by_brute_force(run, harness, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    data = write_benchmarks(tmp_path / "data")
    tasks = ["lambada_openai", "piqa", "hellaswag", "winogrande"]
    measured = run.evaluate(tasks=tasks, task_data=data)

    greedy = [likelihood(harness, text.rpartition(" ")[0], " " + text.rpartition(" ")[2])[1] for text in _texts()]
    assert measured["lambada_openai"]["acc,none"] == pytest.approx(sum(greedy) / 3)
    chosen = [_best(harness, f"Question: {row['goal']}\nAnswer:", (row["sol1"], row["sol2"])) for row in PIQA]
    assert measured["piqa"]["acc,none"] == pytest.approx(_share(chosen, PIQA_LABELS))
    begins = ["Jumping: A man stands. He looks. The man", "Health: How to sleep. Go to bed."]
    chosen = [_best(harness, begin, row["endings"]) for begin, row in zip(begins, HELLASWAG, strict=True)]
    assert measured["hellaswag"]["acc,none"] == pytest.approx(_share(chosen, [row["label"] for row in HELLASWAG]))
    right = [row["answer"] == "21"[_gap(harness, row, 1) > _gap(harness, row, 2)] for row in WINOGRANDE]
    assert measured["winogrande"]["acc,none"] == pytest.approx(sum(right) / 2)

    rows = {row["task"]: row for row in measured.table() if row["measure"] == "acc"}
    assert [rows[task]["chance"] for task in tasks] == ["–", "0.5000", "0.2500", "0.5000"]
    assert [rows[task]["items"] for task in tasks] == ["3", "3", "2", "2"]
    assert run.evaluate(tasks=["piqa"], task_data=data, limit=2)["piqa"]["items"] == 2


def _texts():
    return [row["text"] for row in LAMBADA]


def _best(harness, begin, ends):
    totals = [likelihood(harness, begin, f" {end}")[0] for end in ends]
    return totals.index(max(totals))


def _gap(harness, row, option):
    begin, _, rest = row["sentence"].partition("_")
    return likelihood(harness, begin + row[f"option{option}"], rest)[0]


def _share(chosen, labels):
    return sum(one == label for one, label in zip(chosen, labels, strict=True)) / len(labels)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tasks": ["nowhere"], "include": "EMPTY"}, "has no task 'nowhere'"),
        ({"tasks": ["nowhere"], "include": "EMPTY", "limit": 0}, "`limit` is 0, expected a whole number of 1 or more"),
        ({"tasks": ["nowhere"], "include": "file"}, "`include` is file, expected a folder with .yaml files"),
        ({"limit": 3}, "`limit` needs `tasks`"),
        ({"tasks": ["arc_easy"], "task_data": "EMPTY"}, "`tasks` is 'arc_easy', expected one of lambada_openai"),
    ],
)
def test_wrong_options_of_tasks_are_one_sentence(run, options, sentence, tmp_path):
    options = {name: tmp_path if value == "EMPTY" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=sentence):
        run.evaluate(**options)


def test_generation_ends_before_a_stop(harness):
    whole = harness.generate_until([Request("The number", {"until": [], "max_gen_toks": 12})])[0]
    assert len(whole) <= 12
    stop = whole[3:5]
    cut = harness.generate_until([Request("The number", {"until": [stop], "max_gen_toks": 12})])[0]
    assert cut == whole[: whole.index(stop)]


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_a_task_s_number_of_tokens_counts_under_each_of_its_names(harness, name):
    five, twelve, found = harness.generate_until(
        [Request("The number", settings) for settings in ({"max_gen_toks": 5}, {"max_gen_toks": 12}, {name: 5})]
    )
    assert found == five != twelve
