"""lm-evaluation-harness through EMRModel: each task of a merge gets the scores that its exported checkpoint gets."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_ext.emr import EMRModel
from hf_ext.tasks.texts import byte_tokenizer
from tests.emr.emr_testing import perturb
from tests.emr.use_testing import merge

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "emr" / "lm_harness.py"
TASK = """
task: yes_or_no
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["yes", "no"]
doc_to_target: label
metric_list: [{metric: acc}]
"""


@pytest.mark.filterwarnings("ignore")
def test_each_task_is_measured_with_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    tokenizer = byte_tokenizer(64)
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, **ends)
    ).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    tasks = {}
    for seed, name in enumerate("ab", 1):
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
        perturb(model, seed, 0.5)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        tasks[name] = tmp_path / name
    merged = merge(tmp_path / "base", tasks, tmp_path / "merged")
    rows = [{"text": f"is {word} good?", "label": index % 2} for index, word in enumerate("abcdefghijkl")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "own.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    words = [str(merged), "--benchmarks", "yes_or_no", "--include", str(tmp_path / "benchmarks")]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{") :])
    for name in tasks:
        exported = EMRModel.from_pretrained(merged).export(name, tmp_path / f"{name}-exported")
        model = AutoModelForCausalLM.from_pretrained(exported)
        right = []
        for row in rows:
            start = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
            scores = []
            for choice in (" yes", " no"):
                answer = tokenizer(choice, add_special_tokens=False)["input_ids"]
                with torch.no_grad():
                    logits = model(torch.tensor([start + answer])).logits[0].log_softmax(-1)
                scores.append(sum(float(logits[len(start) + at - 1, token]) for at, token in enumerate(answer)))
            right.append(scores.index(max(scores)) == row["label"])
        assert found[name]["yes_or_no"]["acc,none"] == pytest.approx(sum(right) / len(right)), name
