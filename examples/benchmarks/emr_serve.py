"""How `hf-ext emr serve` stands many clients: requests a second, latencies, and answers of a wrong task.

    python examples/benchmarks/emr_serve.py [--requests 10000] [--clients 32] [--output FILE.json]

Eight classifiers (BERT of 2 layers, width 128) and four generators (GPT-2 of that size) with random weights are merged
and exported; the checkpoint of each task answers every text once, and these are the right answers. The server then is
a process of its own, and clients (threads of this process, each with one connection) ask for random tasks and texts.
An answer is wrong if it is not its task's within 1e-4 (a probability), or letter by letter (a greedy continuation).
Before a load is timed, a tenth of it runs: the server plans its work for each length of text once.
"""

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import installed_versions
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_ext.emr.weights import TaskWeights
from hf_ext.merging import merge_checkpoints

WORDS = ["[PAD]", "[UNK]", *(a + b for a in "bcdfghklmnprst" for b in "aeiou")]
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
CLASSES, TEXTS, LONGEST, NEW_TOKENS = 4, 100, 24, 16


def save(model: PreTrainedModel, folder: Path) -> None:
    """A checkpoint with a tokenizer of 70 words."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def make_merge(folder: Path, base: PreTrainedModel, tasks: int) -> Path:
    """A merge of fine-tunes of a model that are far enough from it to answer otherwise."""
    save(base, folder / "base")
    sources = {}
    for index in range(tasks):
        torch.manual_seed(index + 1)
        model: Any = type(base).from_pretrained(folder / "base")
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
        save(model, folder / f"task{index}")
        sources[f"task{index}"] = str(folder / f"task{index}")
    config = {"base": str(folder / "base"), "tasks": sources}
    return merge_checkpoints(config, folder / "merged", progress=False).path


def right_answers(merged: Path, kind: type[Any], texts: list[str], answer: Callable[..., Any]) -> dict[Any, Any]:
    """What the exported checkpoint of each task says to each text."""
    found = {}
    weights = TaskWeights(merged)
    for task in weights.manifest.tasks:
        folder = weights.export(task, merged.parent / f"{task}-exported")
        model, tokenizer = kind.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)
        for text in texts:
            with torch.no_grad():
                found[task, text] = answer(model, tokenizer, text)
    return found


def classify(model: Any, tokenizer: Any, text: str) -> list[float]:
    """Probabilities of one text."""
    probabilities: list[float] = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).tolist()
    return probabilities


def generate(model: Any, tokenizer: Any, text: str) -> str:
    """A greedy continuation of one text."""
    given = tokenizer(text, return_tensors="pt")
    out = model.generate(
        given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return str(tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


class Load:
    """Clients that ask a server until a number of requests is answered."""

    def __init__(self, url: str, path: str, right: dict[Any, Any], check: Callable[[Any, Any], bool]) -> None:
        self._host, self._path, self._right, self._check = url.split("/")[2], path, right, check
        self._lock = threading.Lock()
        self._left = 0
        self.times: list[float] = []
        self.wrong = self.failed = 0

    def run(self, requests: int, clients: int, body: dict[str, Any], given: str) -> dict[str, Any]:
        """Asks, and tells how long it took."""
        self._ask_all(max(requests // 10, clients), clients, body, given)
        self.times = []
        seconds = self._ask_all(requests, clients, body, given)
        cuts = statistics.quantiles(self.times, n=100)
        return {
            "requests": requests,
            "clients": clients,
            "tasks": len({task for task, _ in self._right}),
            "requests_a_second": round(requests / seconds, 1),
            "p50_ms": round(cuts[49] * 1000, 1),
            "p99_ms": round(cuts[98] * 1000, 1),
            "wrong_answers": self.wrong,
            "failed": self.failed,
        }

    def _ask_all(self, requests: int, clients: int, body: dict[str, Any], given: str) -> float:
        self._left = requests
        threads = [threading.Thread(target=self._ask, args=(seed, body, given)) for seed in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _ask(self, seed: int, body: dict[str, Any], given: str) -> None:
        chance, known = random.Random(seed), list(self._right)
        connection = http.client.HTTPConnection(self._host)
        while self._take():
            task, text = chance.choice(known)
            start = time.perf_counter()
            sent = json.dumps(body | {"model": task, given: text})
            connection.request("POST", self._path, sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = json.loads(response.read())
            took = time.perf_counter() - start
            with self._lock:
                self.times.append(took)
                self.failed += response.status != 200
                self.wrong += response.status == 200 and not self._check(found, self._right[task, text])

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


def near(found: Any, right: list[float]) -> bool:
    """Whether a classification is the right one."""
    return max(abs(a - b) for a, b in zip(found["data"][0]["probs"], right, strict=True)) < 1e-4


def same(found: Any, right: str) -> bool:
    """Whether a continuation is the right one."""
    return bool(found["choices"][0]["text"] == right)


def closest(right: dict[Any, Any]) -> float:
    """The smallest distance between the answers of two tasks to one text: what a wrong task would be off by."""
    texts, tasks = {text for _, text in right}, {task for task, _ in right}
    return min(
        max(abs(a - b) for a, b in zip(right[one, text], right[two, text], strict=True))
        for text in texts
        for one in tasks
        for two in tasks
        if one < two
    )


def measure(merged: Path, load: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Runs a load on a server of its own."""
    command = [sys.executable, "-m", "hf_ext_cli.main", "emr", "serve", str(merged), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None, "the server has not started"
            return load(address[0])
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--output", type=Path, help="write the results here")
    words = parser.parse_args()
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS[2:], k=chance.randint(2, LONGEST))) for _ in range(TEXTS)]
    torch.manual_seed(0)
    classifier = BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), num_labels=CLASSES, **SHAPE))
    generator = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_embd=128, n_layer=2, n_head=4, eos_token_id=1))
    results: dict[str, Any] = {"versions": installed_versions("torch", "transformers", "fastapi", "uvicorn")}
    with tempfile.TemporaryDirectory() as place:
        merged = make_merge(Path(place, "classifiers"), classifier, 8)
        right = right_answers(merged, BertForSequenceClassification, texts, classify)
        for name, tasks in (("classification", 8), ("classification, one task", 1)):
            chosen = {key: value for key, value in right.items() if int(key[0][4:]) < tasks}
            results[name] = measure(
                merged,
                lambda url, chosen=chosen: Load(url, "/v1/classify", chosen, near).run(
                    words.requests, words.clients, {}, "input"
                ),
            )
        results["classification"]["closest_tasks_differ_by"] = round(closest(right), 4)
        merged = make_merge(Path(place, "generators"), generator, 4)
        right = right_answers(merged, GPT2LMHeadModel, texts, generate)
        body = {"temperature": 0, "max_tokens": NEW_TOKENS}
        results["generation"] = measure(
            merged,
            lambda url: Load(url, "/v1/completions", right, same).run(
                max(words.requests // 5, words.clients), words.clients, body, "prompt"
            ),
        ) | {"new_tokens": NEW_TOKENS, "different_answers": len(set(right.values())), "answers": len(right)}
    print(json.dumps(results, indent=2))
    if words.output:
        words.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
