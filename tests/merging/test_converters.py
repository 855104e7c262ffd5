"""A tokenizer of the kind of Llama's through merge, export and LoRA, and into llama.cpp's converter where it is.

LLAMA_CPP=FOLDER of its source runs the converter, which knows such a tokenizer by its form. It reads weights and
tokens of GGUF files back by the library `gguf` that lies beside it.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_ext.emr.weights import TaskWeights
from hf_ext.merging.extracting import extract_lora, open_task
from tests.emr.emr_testing import family, maker
from tests.emr.use_testing import merge

TEXTS = ["a token for a word, another for a word's end", "words and tokens: 12, 34, 56", "merging keeps every token"]
ROWS = 310
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def write_tokenizer(folder: Path) -> None:
    """Pairs of characters with a token for each byte, as Llama 2 and Mistral have them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ends = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(ends)
    known = [*SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=ROWS, special_tokens=known))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


SETTINGS = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2},
}
tiny_llama = maker(lambda: LlamaForCausalLM(LlamaConfig(**SETTINGS)), write_tokenizer)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A task of a merge with masks as a plain checkpoint, a merge into one model, and the task as a LoRA."""
    place = tmp_path_factory.mktemp("llamas")
    config = family(place, tiny_llama)
    merged = merge(place / "base", config["tasks"], place / "merged")
    exported = TaskWeights(merged).export("a", place / "exported")
    one = merge(place / "base", config["tasks"], place / "one", method="average")
    with open_task(str(merged), "a") as pair:
        extract_lora(pair, place / "lora", rank=4, lora_only=True)
    return {"base": place / "base", "exported": exported, "one": one, "lora": place / "lora"}


def test_the_tokenizer_travels_into_every_form(made):
    expected = AutoTokenizer.from_pretrained(made["base"])
    assert len(expected) == ROWS and expected.decode(expected("a word é")["input_ids"]) == "a word é"
    for form in ("exported", "one", "lora"):
        found = AutoTokenizer.from_pretrained(made[form])
        assert found.get_vocab() == expected.get_vocab() and found(TEXTS) == expected(TEXTS)


LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "nowhere"))


def convert(script: str, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    if not (LLAMA_CPP / script).is_file():
        pytest.skip(f"LLAMA_CPP is no folder with {script}")
    # the script imports it to look for another kind of tokenizer
    pytest.importorskip("sentencepiece")
    command = [sys.executable, str(LLAMA_CPP / script), str(source), "--outfile", str(out), "--outtype", "f32", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    monkeypatch.syspath_prepend(LLAMA_CPP / "gguf-py")
    return pytest.importorskip("gguf").GGUFReader(out)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["exported", "one"])
def test_llama_cpp_converts_what_was_exported_and_merged(made, tmp_path, monkeypatch, form):
    reader = convert("convert_hf_to_gguf.py", made[form], tmp_path / "model.gguf", monkeypatch)
    words = reader.fields["tokenizer.ggml.tokens"]
    tokens = [bytes(words.parts[part]).decode() for part in words.data]
    vocabulary = AutoTokenizer.from_pretrained(made[form]).get_vocab()
    assert tokens == sorted(vocabulary, key=vocabulary.__getitem__)
    weights = load_file(made[form] / "model.safetensors")
    found = {tensor.name: torch.tensor(tensor.data.copy()) for tensor in reader.tensors}
    for name, own in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
    ):
        assert found[name].reshape(weights[own].shape).equal(weights[own]), name
    assert len(found) == len(weights)


@pytest.mark.slow
def test_llama_cpp_converts_the_lora(made, tmp_path, monkeypatch):
    words = ("--base", str(made["base"]))
    reader = convert("convert_lora_to_gguf.py", made["lora"], tmp_path / "lora.gguf", monkeypatch, *words)
    factors = load_file(made["lora"] / "adapter_model.safetensors")
    found = {tensor.name: torch.tensor(tensor.data.copy()) for tensor in reader.tensors}
    assert len(found) == len(factors)
    own = "base_model.model.model.layers.0.mlp.down_proj"
    for end, name in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
        assert found[f"blk.0.ffn_down.weight.{end}"].equal(factors[f"{own}.{name}.weight"])
