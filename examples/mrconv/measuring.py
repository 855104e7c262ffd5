"""What the study measures of trained models: scores at a mark; at half the rate, merged, and generating text."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from runs import EXAMPLES, MARKS, Run, candidates, find_mark, open_run
from transformers import AutoTokenizer

from hf_ext.files import read_json, write_json
from hf_ext.mrconv import MRConvForAudioClassification, MRConvForCausalLM
from hf_ext.training import build_task, evaluate, evaluate_checkpoint
from hf_ext.training.sources import open_source

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import flags, median_seconds  # noqa: E402  found through the line above

PROMPTS = ("The interpreter ", "A function definition ", "If the expression ")
NEW_TOKENS = 200


def score(study: Path, data: dict[str, str], run: Run, minutes: int, split: str) -> dict[str, float]:
    """Scores of what a run had reached at a mark, computed once."""
    mark = find_mark(study, run, minutes)
    path = mark / f"scores-{split}.json"
    if not path.is_file():
        arguments, task = open_run(run, data, split)
        model = task.model_class.from_pretrained(mark)
        write_json(path, evaluate(task, model, open_source(arguments.data_arguments.eval_sources[""])))
    return dict(read_json(path))


def choose_rate(study: Path, data: dict[str, str], comparison: str, name: str) -> Run:
    """The candidate with the lowest loss at the first mark, on examples that neither train nor test."""
    first = MARKS[comparison][0]
    return min(candidates(comparison, name), key=lambda run: score(study, data, run, first, "validation")["loss"])


def decimated(snapshot: Path, values: dict[str, Any]) -> dict[str, float]:
    """Scores on every second sample, the kernels moved to that rate and nothing trained."""
    data = {name: value for name, value in values.items() if name in ("data", "task.max_length")}
    words = [*flags(data), "--task.decimation=2"]
    results = evaluate_checkpoint(str(snapshot), EXAMPLES / "fsdd.yaml", words)["results"]
    return {row["metric"]: row["value"] for row in results}


@torch.no_grad()
def merged_times(snapshot: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Scores, outputs and times of a model with branches and of the same one merged."""
    arguments = run_arguments("fsdd", values)
    task = build_task(arguments)
    data = open_source(arguments.data_arguments.eval_sources[""])
    model = MRConvForAudioClassification.from_pretrained(snapshot).eval()
    inputs, one = (task.batch(model, [data[index] for index in range(count)]) for count in (8, 1))
    before, branches = model(**inputs).logits, median_seconds(lambda: model(**one), 9)
    model.reparameterize()
    after, merged = model(**inputs).logits, median_seconds(lambda: model(**one), 9)
    return {
        "difference": float((after - before).abs().max() / before.abs().max()),
        "seconds_per_recording": {"branches": branches, "merged": merged},
        "scores": evaluate(task, model, data),
    }


@torch.no_grad()
def compare_generation(snapshot: Path) -> dict[str, Any]:
    """Greedy texts with the full forward for every token, with the stream, and with the stream of the merged model."""
    tokenizer = AutoTokenizer.from_pretrained(snapshot, padding_side="left")
    model = MRConvForCausalLM.from_pretrained(snapshot).eval()
    prompts = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    texts, seconds = {}, {}

    def generate(name: str, **more: Any) -> None:
        started = time.perf_counter()
        texts[name] = model.generate(**prompts, **options, **more)
        seconds[name] = (time.perf_counter() - started) / (texts[name].shape[1] - prompts["input_ids"].shape[1])

    generate("full forward", use_cache=False)
    generate("streaming")
    whole = texts["streaming"][:, -128:]
    full = model(whole).logits
    first = model(whole[:, :50], use_cache=True)
    second = model(whole[:, 50:], past_key_values=first.past_key_values, use_cache=True)
    streamed = torch.cat([first.logits, second.logits], dim=1)
    model.reparameterize()
    generate("streaming, merged")
    merged = model(whole).logits
    reference = texts["full forward"]
    return {
        "prompts": list(PROMPTS),
        "texts": tokenizer.batch_decode(reference, skip_special_tokens=True),
        "equal": {name: bool(torch.equal(text, reference)) for name, text in texts.items()},
        "seconds_per_token": {name: round(value, 5) for name, value in seconds.items()},
        "difference": {
            "streaming": float((streamed - full).abs().max() / full.abs().max()),
            "merged": float((merged - full).abs().max() / full.abs().max()),
        },
    }
